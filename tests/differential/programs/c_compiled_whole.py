#: captures: no
#: needs: torch
#: slow:
"""torch.compile with fullgraph=True of a function that calls a hooked one."""

import torch
from tinyrl import Trainer, evaluate

function = torch.compile(lambda value: Trainer.reward([0, 1], value) + 1, backend="eager", fullgraph=True)
print(Trainer().fit(1))
print(function(torch.ones(3)).tolist())


def double(value):
    return value * 2


print(torch.compile(lambda value: evaluate(double, value), backend="eager", fullgraph=True)(torch.ones(2)))
