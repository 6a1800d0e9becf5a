#: captures: yes
#: slow:
#: needs: torch
"""os.fork in a captured stage. The children compute, capture nothing, and exit in different ways."""

import os
import sys

import torch
from tinyrl import Trainer


def work():
    statuses = []
    for leave in (lambda: os._exit(3), lambda: sys.exit(4), lambda: 1 / 0):
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            print(Trainer().fit(1, lambda: torch.ones(4).sum().item()), flush=True)
            leave()
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    return statuses


print(Trainer().update(lambda: torch.ones(3).sum().item()))
print(Trainer().fit(1, lambda: None))
trainer = Trainer()
trainer.global_step = 2
print(trainer.train_step(lambda: None), trainer.update(work))
