#: captures: yes
#: slow:
#: needs: torch
#: set: AUTOPROF_CONTENTS=cpu,stack,shapes
"""Module that changes its dtype while shapes are recorded."""

import torch
from tinyrl import Trainer

torch.__future__.set_swap_module_params_on_conversion(True)
model = torch.nn.Linear(8, 8)


def work():
    model(torch.ones(3, 8, dtype=model.weight.dtype)).sum().backward()
    model.zero_grad()
    model.to(torch.float64).to(torch.float32)
    return model.weight.dtype


print(Trainer().fit(3, work))
