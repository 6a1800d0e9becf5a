"""Decorators of all kinds around hooked functions: classes with __call__, descriptors, contextlib's."""

import contextlib
import functools

from tinyrl import Trainer, score


class Counting:
    def __init__(self, function):
        functools.update_wrapper(self, function)
        self.function, self.count = function, 0

    def __call__(self, *args, **kwargs):
        self.count += 1
        return self.function(*args, **kwargs)

    def __get__(self, instance, owner):
        return functools.partial(self, instance) if instance is not None else self


class Mine(Trainer):
    update = Counting(Trainer.update)
    also = Trainer.update
    other = property(Trainer.update)


print(Mine().fit(), Mine.update.count, Mine.update.__wrapped__ is Trainer.update, Mine().other, Mine().also())


@contextlib.contextmanager
def within():
    print("enters")
    try:
        yield score(["a"])
    finally:
        print("leaves", score(["b"]))


with within() as found:
    print(found)
print(within()(score)(["abc"]))
with contextlib.ExitStack() as stack:
    stack.callback(score, ["a"])
    stack.enter_context(within())
