#: captures: yes
#: slow:
#: needs: torch
"""Limit of open files during captured steps."""

import os
import resource

import torch
from tinyrl import Trainer

trainer = Trainer()
trainer.fit(1, lambda: torch.ones(2))
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
opened = []


def use():
    try:
        while True:
            opened.append(os.open("/dev/null", os.O_RDONLY))
    except OSError as error:
        return error.strerror


trainer.global_step = 2
print(trainer.train_step(lambda: None), trainer.update(use))
for trainer.global_step in range(3, 6):
    print(trainer.train_step(lambda: torch.ones(2).sum().item()))
for descriptor in opened:
    os.close(descriptor)
