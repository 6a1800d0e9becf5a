#: differs: asyncio shows the place of a wrapped method, because it has __wrapped__, but not of a plain one
"""Name of a failing callback in asyncio's debug mode."""

import asyncio

from tinyrl import Trainer


async def main():
    loop = asyncio.get_running_loop()
    loop.set_debug(True)
    loop.set_exception_handler(lambda _, said: print(said["message"]))
    loop.call_soon(Trainer().update, int, "x")
    await asyncio.sleep(0)
    await asyncio.sleep(0)


asyncio.run(main())
