"""Trainer whose step number is a property that raises, or that later returns another value."""

from tinyrl import Trainer


class Raises(Trainer):
    global_step = property(lambda self: 1 / 0, lambda self, value: None)


class Exits(Trainer):
    global_step = property(lambda self: self.numbers.pop(), lambda self, value: None)

    def __init__(self):
        self.seen = []
        self.numbers = ["one", None, 3.5, float("nan"), -1, 10**30, b"2"]


print(Raises().fit(), Exits().fit(7))
