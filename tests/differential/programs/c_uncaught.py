#: captures: yes
#: slow:
#: needs: torch
"""Uncaught exception in a captured stage, with functions registered at exit."""

import atexit

import torch
from tinyrl import Trainer

atexit.register(print, "at exit")
Trainer().fit(inside=lambda: torch.ones(2) @ torch.ones(3))
