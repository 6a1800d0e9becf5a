#: differs: asyncio follows __wrapped__ of a bound method to say where it is, of a bare one it says nothing
"""Asyncio's debug mode names a callback that fails."""

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
