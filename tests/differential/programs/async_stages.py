"""Coroutines: awaited, gathered, cancelled, timed out, shielded, in task groups, as callbacks."""

import asyncio
import traceback

from tinyrl import Trainer

trainer = Trainer()


async def slow(*_):
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError as error:
        print("cancelled", error.args)
        raise


async def fails(*_):
    await asyncio.sleep(0)
    raise ValueError("fails")


async def main():
    print(await trainer.afit(), await trainer.agenerate(), await trainer.sample(3))
    task = asyncio.create_task(trainer.agenerate(slow), name="named")
    await asyncio.sleep(0.3)
    task.cancel("message")
    try:
        await task
    except asyncio.CancelledError as error:
        print(error.args, task.cancelled(), task.get_name())
    try:
        async with asyncio.timeout(0.3):
            await trainer.agenerate(slow)
    except TimeoutError as error:
        print(repr(error), type(error.__cause__))
    try:
        await asyncio.wait_for(trainer.sample(1, slow), 0.3)
    except TimeoutError as error:
        print(repr(error))
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(trainer.agenerate(slow))
            group.create_task(trainer.sample(1, fails))
    except ExceptionGroup as group:
        print(group.exceptions)
        traceback.print_exc()
    print(await asyncio.gather(*(trainer.sample(n, fails) for n in range(3)), return_exceptions=True))
    shielded = asyncio.shield(trainer.agenerate())
    print(await shielded)
    coroutine = trainer.agenerate(slow)
    print(asyncio.iscoroutine(coroutine), coroutine.__name__, coroutine.__qualname__)
    coroutine.close()
    print(len(asyncio.all_tasks()))


asyncio.run(main())
