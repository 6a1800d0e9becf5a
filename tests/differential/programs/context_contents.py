#: differs: a span of a sample sets a context variable of autoprof
"""Names of the context variables, as a program that copies contexts sees them."""

import asyncio
import contextvars

from tinyrl import Trainer

seen = []


def look(*_):
    seen.append(sorted(variable.name for variable in contextvars.copy_context()))


async def alook(*args):
    look()


Trainer().fit(inside=look)
asyncio.run(Trainer().afit(inside=alook))
asyncio.run(Trainer().sample(3, alook))
look()
print(seen)
