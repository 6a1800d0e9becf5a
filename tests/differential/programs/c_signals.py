#: captures: yes
#: slow:
#: needs: torch
"""Repeated checkpoint signals in captured stages, and a timer."""

import os
import signal

import torch
from tinyrl import Trainer

saved = []
signal.signal(signal.SIGUSR1, lambda *_: saved.append(torch.ones(2).sum().item()))
ticks = []
signal.signal(signal.SIGALRM, lambda *_: ticks.append(1))
signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
print(Trainer().fit(3, lambda: os.kill(os.getpid(), signal.SIGUSR1)), saved)
signal.setitimer(signal.ITIMER_REAL, 0)
print(len(ticks) >= 0, signal.getitimer(signal.ITIMER_REAL))
