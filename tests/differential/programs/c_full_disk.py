#: captures: yes
#: slow:
#: needs: torch
"""File size limit of 20 kB: the program's own writes fail as without autoprof, and nothing else fails."""

import resource
import signal

import torch
from tinyrl import Trainer

print(Trainer().fit(1, lambda: torch.ones(2).sum().item()))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))


def write():
    try:
        torch.save(torch.ones(100_000), "large.pt")
    except Exception as error:
        return type(error).__name__
    return torch.ones(3).sum().item()


trainer = Trainer()
for trainer.global_step in range(2, 5):
    print(trainer.train_step(write))
