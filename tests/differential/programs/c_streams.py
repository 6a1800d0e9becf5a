#: captures: yes
#: slow:
#: needs: torch
#: shell: exec $PYTHON c_streams.py 0<&- 2>&-
"""Captures without standard error."""

import sys

import torch
from tinyrl import Trainer

print(Trainer().fit(2, lambda: torch.ones(2).sum().item()), sys.stderr)
