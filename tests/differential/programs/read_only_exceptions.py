"""Exceptions with read-only attributes or with special attributes of their class, which reach the caller unchanged."""

import asyncio
import dataclasses
import signal
import traceback

from tinyrl import Trainer, blocks, evaluate


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    after: int = 3


class Refuses(Exception):
    def __setattr__(self, name, value):
        raise RuntimeError(f"{name} is set")

    def __delattr__(self, name):
        raise RuntimeError(f"{name} is deleted")


class Properties(Exception):
    @property
    def __traceback__(self):
        raise SystemExit("__traceback__ is read")

    @property
    def __context__(self):
        raise SystemExit("__context__ is read")

    @property
    def __cause__(self):
        raise SystemExit("__cause__ is read")

    @property
    def __suppress_context__(self):
        raise SystemExit("__suppress_context__ is read")

    @property
    def __class__(self):
        raise SystemExit("__class__ is read")

    @property
    def args(self):
        raise SystemExit("args is read")

    @property
    def cause(self):
        raise SystemExit("cause is read")

    @property
    def exceptions(self):
        raise KeyboardInterrupt("exceptions is read")

    @property
    def failures(self):
        raise asyncio.CancelledError("failures is read")

    def __bool__(self):
        raise RuntimeError("its truth is asked")

    def __eq__(self, other):
        raise RuntimeError("it is compared")

    __hash__ = None


class Slots(Exception):
    __slots__ = ("__context__", "__traceback__", "cause")


class Asked(Exception):
    def __getattribute__(self, name):
        raise SystemExit(f"{name} is read")

    def __len__(self):
        raise SystemExit("its length is asked")


class Named(type):
    @property
    def __name__(cls):
        raise SystemExit("the class's name is read")

    def __instancecheck__(cls, instance):
        raise SystemExit("an instance is checked")


class Metaclass(Exception, metaclass=Named):
    pass


class Base(BaseException):
    @property
    def __class__(self):
        raise RuntimeError("__class__ is read")


KINDS = (Frozen, Refuses, Properties, Slots, Asked, Metaclass, Base)
getters = {
    name: getattr(BaseException, name).__get__
    for name in ("__traceback__", "__context__", "__cause__", "__suppress_context__")
}


def name_of(error):
    return None if error is None else type.__dict__["__name__"].__get__(type(error))


def show(where, error, call, *args, **named):
    BaseException.with_traceback(error, None)
    BaseException.__context__.__set__(error, None)
    BaseException.__cause__.__set__(error, None)
    try:
        call(*args, **named)
    except BaseException as found:
        same = found is error
    else:
        same = "nothing was raised"
    frames = [frame.name for frame in traceback.extract_tb(getters["__traceback__"](error))]
    frames = [name for name in frames if name in ("fail", "afail", "from_another", "late", "show", "train_step")]
    print(where, name_of(error), same, frames, getters["__suppress_context__"](error), end=" ")
    print(name_of(getters["__context__"](error)), name_of(getters["__cause__"](error)))


def by_coroutine(function, *args, **named):
    """Run a coroutine without asyncio, because asyncio reads `__class__` of exceptions."""
    coroutine = function(*args, **named)
    while True:
        coroutine.send(None)


def by_signal(call, error):
    def late(number, frame):
        raise error

    signal.signal(signal.SIGUSR1, late)
    call(inside=lambda: signal.raise_signal(signal.SIGUSR1))


def by_block(fail):
    with blocks.locked():
        fail()


class Fails:
    def __init__(self, fail):
        self.fail = fail

    def __next__(self):
        self.fail()


class Iterates:
    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return self.items


def by_next(items):
    return list(blocks.loader(Iterates(items)))


def numbers(fail):
    yield 1
    fail()


def thrown(error):
    items = blocks.batches(3)
    next(items)
    items.throw(error)


async def athrown(error):
    items = blocks.abatches(3)
    await items.asend(None)
    await items.athrow(error)


def show_all(kind):
    trainer, error = Trainer(), kind()

    def fail():
        raise error

    def from_another():
        try:
            raise KeyError("first")
        except KeyError as first:
            raise error from first

    async def afail(*args):
        await asyncio.sleep(0)
        raise error

    for call in (trainer.update, trainer.fit, evaluate):
        show("sync", error, call, inside=fail)
        show("chained", error, call, inside=from_another)
        show("signal", error, by_signal, call, error)
    for call in (trainer.agenerate, trainer.afit):
        show("async", error, by_coroutine, call, inside=afail)
    show("sample", error, by_coroutine, trainer.sample, 1, inside=afail)
    show("block", error, by_block, fail)
    show("next", error, by_next, Fails(fail))
    show("generator", error, by_next, numbers(fail))
    show("thrown", error, thrown, error)
    show("athrown", error, by_coroutine, athrown, error)


for kind in KINDS:
    show_all(kind)
