#: captures: yes
#: slow:
#: needs: torch
"""os._exit immediately after a captured step."""

import os

import torch
from tinyrl import Trainer

print(Trainer().fit(2, lambda: torch.ones(2).sum().item()), flush=True)
os._exit(6)
