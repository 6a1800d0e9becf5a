"""Context managers that a trainer uses as timers, and iterators of its data."""

import contextlib


@contextlib.contextmanager
def timer(name):
    try:
        yield name
    except KeyError as error:
        print("swallowed", error)
    finally:
        print("left", name)


@contextlib.asynccontextmanager
async def atimer(name):
    yield name


class Lock:
    """Context manager with slots, which does not support weak references."""

    __slots__ = ("depth",)

    def __init__(self):
        self.depth = 0

    def __enter__(self):
        self.depth += 1
        return self

    def __exit__(self, *raised):
        self.depth -= 1


def locked():
    return Lock()


def batches(count):
    """Yield batch numbers; accept sent numbers and thrown exceptions, and print a line at the end."""
    number = 0
    try:
        while number < count:
            try:
                sent = yield number
            except ValueError as error:
                print("thrown", error)
                sent = None
            number = number + 1 if sent is None else sent
    finally:
        print("closed at", number)
    return "all"


async def abatches(count):
    try:
        for number in range(count):
            yield number
    finally:
        print("closed")


class Loader:
    def __init__(self, batches):
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        return iter(Batches(self.batches))


class Batches:
    def __init__(self, batches):
        self.left = list(batches)

    def __iter__(self):
        return self

    def __next__(self):
        if not self.left:
            raise StopIteration("no more")
        return self.left.pop(0)


def loader(batches):
    return Loader(batches)


def zipped(batches):
    return zip(batches, batches, strict=False)
