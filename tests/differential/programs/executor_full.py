#: captures: no
"""Default executor full of jobs that wait for a hooked coroutine."""

import asyncio
import threading

from tinyrl import Trainer

go = threading.Event()


async def opens():
    go.set()
    return "went on"


async def main():
    loop = asyncio.get_running_loop()
    jobs = [loop.run_in_executor(None, go.wait, 2) for _ in range(64)]
    trainer = Trainer()
    trainer.global_step = 1
    print(await trainer.agenerate(opens), all(await asyncio.gather(*jobs)))


asyncio.run(main())
