#: needs: uvloop
"""Coroutines, cancellation and subprocesses in uvloop."""

import asyncio

import uvloop
from tinyrl import Trainer

trainer = Trainer()


async def slow(*_):
    await asyncio.sleep(60)


async def main():
    print(type(asyncio.get_running_loop()).__module__, await trainer.afit())
    task = asyncio.create_task(trainer.agenerate(slow))
    await asyncio.sleep(0.3)
    task.cancel()
    print(await asyncio.gather(task, *(trainer.sample(n) for n in range(50)), return_exceptions=True))
    process = await asyncio.create_subprocess_exec("echo", "child", stdout=-1)
    print(await process.communicate())


uvloop.run(main())
