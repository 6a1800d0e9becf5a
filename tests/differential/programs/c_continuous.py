#: captures: yes
#: slow:
#: needs: torch
#: set: AUTOPROF_MODE=continuous
"""One capture for each whole step."""

import torch
from tinyrl import Trainer

print(Trainer().fit(3, lambda: torch.ones(4).mm(torch.ones(4)) if False else torch.ones(4).sum().item()))
try:
    Trainer().fit(1, lambda: 1 / 0)
except ZeroDivisionError as error:
    print(error.__context__)
