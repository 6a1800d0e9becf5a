#: captures: yes
#: slow:
#: needs: torch
"""Endless recursion in a captured stage, and nested stages."""

import torch
from tinyrl import Trainer, evaluate

trainer = Trainer()


def endless():
    return endless()


try:
    trainer.fit(inside=endless)
except RecursionError as error:
    print(error, error.__context__)
trainer.global_step = 2
print(trainer.train_step(lambda: trainer.update(lambda: evaluate(lambda: torch.ones(2).sum().item()))))
print(trainer.update(lambda: trainer.generate(lambda: trainer.train_step(lambda: 5))))
