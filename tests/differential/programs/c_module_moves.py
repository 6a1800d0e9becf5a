#: captures: yes
#: slow:
#: needs: torch
#: python: {script} default
#: python: {script} shapes
#: set: AUTOPROF_CONTENTS=cpu,stack,shapes
"""Module that changes its dtype and back, between and in captured stages, while its parameters are swapped.

One run records shapes too.
"""

import gc

import torch
from tinyrl import Trainer

torch.__future__.set_swap_module_params_on_conversion(True)
model = torch.nn.Linear(8, 8)


def work():
    model(torch.ones(3, 8, dtype=model.weight.dtype)).sum().backward()
    model.zero_grad()
    model.to(torch.float64).to(torch.float32)
    return model.weight.dtype


trainer = Trainer()
print(trainer.fit(3, work))
model.to(torch.bfloat16)
print(work())
