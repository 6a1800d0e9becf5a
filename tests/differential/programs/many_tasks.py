"""10,000 concurrent tasks."""

import asyncio

from tinyrl import Trainer

trainer = Trainer()


async def twice(number):
    await asyncio.sleep(0)
    return number * 2


async def main():
    found = await asyncio.gather(*(trainer.sample(number, twice) for number in range(10_000)))
    print(found == [number * 2 for number in range(10_000)], len(asyncio.all_tasks()))


asyncio.run(main())
