"""Wrapped function, which is always the same object, with its own names and module."""

import tinyrl
import tinyrl.trainer
from tinyrl import Trainer, score

print(tinyrl.score is tinyrl.trainer.score is score)
print(Trainer.update is Trainer.update, Trainer.__dict__["update"] is Trainer.update)
print({Trainer.update: 1}[Trainer.update], Trainer.update in {Trainer.update})
trainer = Trainer()
print(trainer.update == trainer.update, trainer.update.__func__ is Trainer.update, trainer.update.__self__ is trainer)
for function in (Trainer.update, Trainer.build, Trainer.reward, Trainer.agenerate, score):
    print(function.__name__, function.__qualname__, function.__module__, function.__doc__, type(function).__name__)
print(type(Trainer.__dict__["build"]).__name__, type(Trainer.__dict__["reward"]).__name__)
trainer.fit()
