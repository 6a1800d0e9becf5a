"""Hooked function that the user replaces and restores, as users of trainers do."""

from tinyrl import Trainer
from tinyrl import trainer as module

original = Trainer.update


def mine(self, inside=None, *args):
    return "mine", original(self, lambda: "inner")


Trainer.update = mine
print(Trainer().fit(), Trainer.update is mine)
Trainer.update = original
print(Trainer().fit(), Trainer.update is original)
trainer = Trainer()
trainer.update = lambda inside: "of the instance"
print(trainer.fit(), vars(trainer).keys())
del trainer.update
print(trainer.fit(1))
module.score = lambda texts: "patched"
print(module.score([]))
