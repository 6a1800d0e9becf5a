"""Descriptors: bound methods, explicit calls of __get__, __slots__, __getattr__, __getattribute__."""

from tinyrl import Trainer


class Slotted(Trainer):
    __slots__ = ("extra",)


class Strict:
    __slots__ = ("global_step", "seen")
    fit, train_step, generate, update = Trainer.fit, Trainer.train_step, Trainer.generate, Trainer.update

    def __init__(self):
        self.seen = []


class Asked(Trainer):
    asked = []

    def __getattribute__(self, name):
        type(self).asked.append(name)
        return super().__getattribute__(name)


class Loose:
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args: name


print(Slotted().fit(), Strict().fit(), Trainer.update.__get__(Trainer())(lambda: 3))
print(Trainer.__dict__["build"].__get__(None, Slotted)().__class__.__name__, Trainer.__dict__["reward"].__func__("a"))
print(Trainer.update(Loose()), Trainer.train_step(Strict.__new__(Slotted).__class__()))
asked = Asked()
asked.fit()
print("update" in Asked.asked)
