#: captures: yes
#: slow:
#: needs: torch
"""Coroutine stages in captured steps, among a thousand tasks, with cancellation and time-outs."""

import asyncio

import torch
from tinyrl import Trainer

trainer = Trainer()


async def work(*_):
    await asyncio.sleep(0)
    return torch.ones(4).sum().item()


async def slow(*_):
    await asyncio.sleep(60)


async def main():
    print(await trainer.afit(2, work))
    trainer.global_step = 3
    print(sum(await asyncio.gather(*(trainer.sample(number, work) for number in range(1000)))))
    try:
        await asyncio.wait_for(trainer.atrain_step(slow), 5)
    except TimeoutError as error:
        print(repr(error))
    print(await trainer.atrain_step(work), len(asyncio.all_tasks()))


asyncio.run(main())
