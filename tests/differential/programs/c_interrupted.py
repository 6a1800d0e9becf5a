#: captures: yes
#: slow:
#: needs: torch
"""Ctrl-C in a captured stage."""

import os
import signal

import torch
from tinyrl import Trainer

Trainer().fit(inside=lambda: (torch.ones(2), os.kill(os.getpid(), signal.SIGINT)))
