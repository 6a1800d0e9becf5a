"""Number of turns of the event loop that a coroutine takes, and the order in which tasks end."""

import asyncio

from tinyrl import Trainer

order = []


async def main():
    trainer = Trainer()

    async def one(number, call):
        await call
        order.append(number)

    await asyncio.gather(
        one(1, trainer.agenerate()), one(2, trainer.sample(1)), one(3, asyncio.sleep(0)), one(4, trainer.agenerate())
    )
    task = asyncio.ensure_future(trainer.agenerate())
    turns = 0
    while not task.done():
        await asyncio.sleep(0)
        turns += 1
    print(order, turns)


asyncio.run(main())
