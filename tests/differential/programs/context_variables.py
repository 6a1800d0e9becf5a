"""Context variables that are set in stages and read outside, in tasks and in copies."""

import asyncio
import contextvars

from tinyrl import Trainer

number = contextvars.ContextVar("number", default=0)
trainer = Trainer()
trainer.update(number.set, 1)
print(number.get())


async def sets(*_):
    number.set(number.get() + 10)
    return number.get()


async def main():
    print(await trainer.agenerate(sets), number.get())
    print(await asyncio.create_task(trainer.sample(1, sets)), number.get())
    print(await asyncio.gather(*(trainer.sample(n, sets) for n in range(3))), number.get())
    token = number.set(7)
    await trainer.agenerate(sets)
    number.reset(token)
    print(number.get())


asyncio.run(main())
context = contextvars.copy_context()
print(context.run(trainer.update, number.get), len(list(contextvars.Context())))
context.run(lambda: trainer.update(number.set, 99))
print(number.get(), context[number])
