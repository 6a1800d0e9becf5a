#: captures: yes
#: slow:
#: needs: torch
"""sys.exit in a captured stage."""

import sys

import torch
from tinyrl import Trainer

Trainer().fit(inside=lambda: sys.exit(int(torch.ones(3).sum())))
