#: captures: yes
#: slow:
#: needs: torch
"""The program ends at once after a captured step, by os._exit."""

import os

import torch
from tinyrl import Trainer

print(Trainer().fit(2, lambda: torch.ones(2).sum().item()), flush=True)
os._exit(6)
