#: captures: yes
#: slow:
#: needs: torch
"""SIGTERM in a captured stage, without a handler, and with one that saves a checkpoint and exits."""

import os
import signal
import sys

import torch
from tinyrl import Trainer

trainer = Trainer()


def save(number, frame):
    torch.save({"step": trainer.global_step}, "checkpoint.pt")
    print("saved", flush=True)
    sys.exit(143)


signal.signal(signal.SIGTERM, save)
trainer.fit(inside=lambda: os.kill(os.getpid(), signal.SIGTERM))
