"""Coroutines that run after the loop's executor was shut down."""

import asyncio

from tinyrl import Trainer


async def main():
    await asyncio.get_running_loop().shutdown_default_executor()
    print(await Trainer().afit(), await Trainer().agenerate())


asyncio.run(main())
