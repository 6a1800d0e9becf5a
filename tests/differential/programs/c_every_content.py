#: captures: yes
#: slow:
#: needs: torch
#: set: AUTOPROF_CONTENTS=cpu,memory,shapes,stack,module,flops
"""Captures with all contents."""

import torch
from tinyrl import Trainer

torch.manual_seed(0)
model = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
print(Trainer().fit(2, lambda: round(model(torch.ones(2, 3, 16)).sum().item(), 3)))
