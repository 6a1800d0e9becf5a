"""Coroutines without asyncio, and loops that are created and closed explicitly."""

import asyncio

from tinyrl import Trainer

coroutine = Trainer().sample(5)
turns = 0
try:
    while True:
        coroutine.send(None)
        turns += 1
except StopIteration as stop:
    print(stop.value, turns)
loop = asyncio.new_event_loop()
print(loop.run_until_complete(Trainer().afit()))
loop.run_until_complete(loop.shutdown_asyncgens())
loop.close()
print(loop.is_closed())
try:
    asyncio.get_running_loop()
except RuntimeError as error:
    print(error)
with asyncio.Runner() as runner:
    print(runner.run(Trainer().agenerate()))
    print(runner.run(Trainer().agenerate()))
