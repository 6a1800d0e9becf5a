#: captures: yes
#: slow:
#: needs: torch
"""Stages in 20 concurrent threads in captured steps; one of them is recorded."""

import threading

import torch
from tinyrl import Trainer

found = []


def work():
    return torch.ones(8).sum().item()


def thread(number):
    trainer = Trainer()
    trainer.global_step = 1
    found.extend(trainer.fit(3, work))


threads = [threading.Thread(target=thread, args=(number,)) for number in range(20)]
for each in threads:
    each.start()
for each in threads:
    each.join()
print(len(found), set(found), threading.active_count() <= 2)
