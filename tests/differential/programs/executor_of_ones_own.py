#: captures: no
"""Default executor of the user: its jobs, and the absence of any other executor."""

import asyncio
import concurrent.futures
import threading

from tinyrl import Trainer

submitted = []


class Executor(concurrent.futures.ThreadPoolExecutor):
    def submit(self, function, /, *args, **kwargs):
        submitted.append(getattr(function, "__name__", type(function).__name__))
        return super().submit(function, *args, **kwargs)


async def main():
    loop = asyncio.get_running_loop()
    print(loop._default_executor)
    await Trainer().afit()
    print(loop._default_executor, [thread.name for thread in threading.enumerate()])
    loop.set_default_executor(Executor(2, "mine"))
    await Trainer().afit()
    print(await loop.run_in_executor(None, lambda: "mine"), len(submitted))


asyncio.run(main())
