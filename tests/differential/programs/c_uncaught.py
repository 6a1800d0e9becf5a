#: captures: yes
#: slow:
#: needs: torch
"""An exception that nobody catches, in a captured stage, with at-exit functions."""

import atexit

import torch
from tinyrl import Trainer

atexit.register(print, "at exit")
Trainer().fit(inside=lambda: torch.ones(2) @ torch.ones(3))
