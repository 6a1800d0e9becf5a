"""Blocks and iterators that hooked functions return: their types, their values, and the references that remain."""

import asyncio
import contextlib
import copy
import gc
import inspect
import pickle
import sys
import warnings
import weakref

from tinyrl import blocks

warnings.simplefilter("always")


def said(value):
    """Return the description of an object without its address."""
    return repr(value).partition(" at 0x")[0]


class Model:
    """Large object, which must be freed with its last reference."""


with blocks.timer("block") as name:
    print(name)
with blocks.timer("swallows"):
    raise KeyError("mine")
try:
    with blocks.timer("raises"):
        raise LookupError("mine")
except LookupError as error:
    print(type(error), error, error.__context__, error.__cause__, error.__suppress_context__)
with contextlib.ExitStack() as stack:
    print([stack.enter_context(blocks.timer(str(number))) for number in range(3)])


@blocks.timer("decorates")
def decorated():
    return "through"


print(decorated(), decorated())
made = blocks.timer("unused")
print(said(made), isinstance(made, contextlib.AbstractContextManager), made.__class__, sorted(vars(made)))
lock = blocks.locked()
with lock, lock:
    print(lock.depth, said(lock), type(lock))
print(copy.copy(lock).depth, pickle.loads(pickle.dumps(lock)).depth)

items = blocks.batches(4)
print(inspect.isgenerator(items), inspect.isgeneratorfunction(blocks.batches), items.__name__, items.__qualname__)
print(inspect.getgeneratorstate(items), next(items), inspect.getgeneratorstate(items))
print(items.send(2), items.throw(ValueError("mine")))
try:
    next(items)
except StopIteration as end:
    print(end.value, inspect.getgeneratorstate(items))
print(list(blocks.batches(3)), dict(zip("ab", blocks.batches(2), strict=False)))
items = blocks.batches(3)
next(items)
items.close()
items = blocks.batches(3)
next(items)
del items
items = blocks.batches(1)
next(items)
try:
    items.throw(LookupError("mine"))
except LookupError as error:
    print(error, error.__context__)
try:
    list(blocks.batches("wrong"))
except TypeError as error:
    print(error)


def delegates():
    return (yield from blocks.batches(2))


print(list(delegates()))

loader = blocks.loader(["a", "b"])
print(len(loader), list(loader), list(loader), said(loader), loader.__class__, sorted(vars(loader)))
iterator = iter(loader)
print(next(iterator), iter(iterator) is iterator, vars(iterator), isinstance(iterator, blocks.Batches))
print(vars(pickle.loads(pickle.dumps(loader))), vars(copy.deepcopy(iterator)))
print(list(blocks.zipped([1, 2])), type(blocks.zipped([])))


async def main():
    async with blocks.atimer("asynchronous") as name:
        print(name)
    print([number async for number in blocks.abatches(3)])
    items = blocks.abatches(3)
    print(await anext(items), inspect.isasyncgen(items))
    await items.aclose()
    async for number in blocks.abatches(3):
        print(number)
        break
    task = asyncio.create_task(anext(blocks.abatches(1)))
    print(await task)


asyncio.run(main())

gc.collect()
gc.disable()
model = Model()
kept = blocks.loader([model]), blocks.batches(model), blocks.timer(model)
gone = weakref.ref(model)
print(sys.getrefcount(model) > 1)
del model, kept
print(gone())
print(gc.collect() > 1000, gc.garbage)
