#: captures: no
#: python: -X dev {script}
"""Debug mode of asyncio, its exception handler, and slow callbacks."""

import asyncio

from tinyrl import Trainer

trainer = Trainer()


async def fails(*_):
    raise ValueError("nobody asks")


async def main():
    loop = asyncio.get_running_loop()
    loop.slow_callback_duration = 60
    loop.set_exception_handler(lambda _, said: print(repr(said["exception"])))
    task = asyncio.create_task(trainer.agenerate(fails))
    await asyncio.wait([task])
    del task
    await asyncio.sleep(0)
    print(loop.get_debug(), await trainer.afit())
    loop.call_soon(trainer.update, lambda: print("called soon"))
    loop.call_soon(trainer.update, lambda: 1 / 0)
    await asyncio.sleep(0.1)


asyncio.run(main())
