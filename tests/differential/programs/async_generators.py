"""Async generators, async contexts and comprehensions with stages inside."""

import asyncio
import contextlib

from tinyrl import Trainer

trainer = Trainer()


async def samples(count):
    try:
        for number in range(count):
            yield await trainer.sample(number)
    finally:
        print("ends", await trainer.agenerate())


@contextlib.asynccontextmanager
async def within():
    yield await trainer.agenerate()
    print("leaves")


async def main():
    print([each async for each in samples(3)])
    generator = samples(5)
    print(await anext(generator))
    await generator.aclose()
    async with within() as found:
        print(found)
    left = samples(4)
    print(await left.__anext__())
    print(await trainer.afit())


asyncio.run(main())
