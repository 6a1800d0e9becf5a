"""Subclasses that override, that call super with and without arguments, and that inherit from two classes."""

from tinyrl import Trainer


class Timed:
    def update(self, *args, **kwargs):
        return "timed", super().update(*args, **kwargs)


class Mine(Timed, Trainer):
    def update(self, *args, **kwargs):
        return "mine", super().update(*args, **kwargs)

    def generate(self, inside=None):
        return super(Mine, self).generate(lambda: "generated")

    @classmethod
    def build(cls, name="x"):
        return super().build(name + "y")

    @staticmethod
    def reward(text, scale=1):
        return Trainer.reward(text, scale) + 1


print(Mine().fit(), Mine.build().name, Mine.reward("ab"), Mine.instances, Trainer.instances)
print([each.__name__ for each in Mine.__mro__], Mine().generate())
print("update" in vars(Mine), "train_step" in vars(Mine), Mine.train_step is Trainer.train_step)
