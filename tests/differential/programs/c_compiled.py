#: captures: yes
#: slow:
#: needs: torch
"""torch.compile of functions that call hooked ones, and of a module called in captured stages."""

import torch
from tinyrl import Trainer, evaluate

model = torch.nn.Linear(4, 4)
compiled = torch.compile(model, backend="eager")
function = torch.compile(lambda value: evaluate(lambda: value * 2) + 1, backend="eager")


def work():
    return compiled(torch.zeros(2, 4)).shape, function(torch.ones(3)).tolist()


print(Trainer().fit(3, work))
print(torch._dynamo.utils.counters["stats"]["calls_captured"] > 0)
