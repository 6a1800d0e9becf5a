#: captures: yes
#: slow:
#: needs: torch
#: ignore: ^ERROR:.*Failed to write to log file
#: python: {script} 0 default
#: python: {script} 0 default file
#: python: {script} 20000 default
#: python: {script} 20000 handled
"""File size limit in captured steps; its signal ends the process, or has a handler.

In some runs, stderr is a file too.
"""

import os
import resource
import signal
import sys

import torch
from tinyrl import Trainer


def train():
    return sum(torch.ones(2).sum().item() for _ in range(100))


trainer = Trainer()
trainer.fit(1, train)
came = []
signal.signal(signal.SIGXFSZ, signal.SIG_DFL if sys.argv[2] == "default" else lambda *_: came.append(1))
limit = int(sys.argv[1])
if sys.argv[3:]:
    os.dup2(os.open("stderr", os.O_WRONLY | os.O_CREAT), 2)
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
for trainer.global_step in range(2, 5):
    print(trainer.train_step(train))
print(came, signal.pthread_sigmask(signal.SIG_BLOCK, []), signal.sigpending())
