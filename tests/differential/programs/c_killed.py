#: captures: yes
#: slow:
#: needs: torch
"""Process that kills itself in a captured stage."""

import os
import signal

import torch
from tinyrl import Trainer

print(torch.ones(2), flush=True)
trainer = Trainer()
trainer.fit(1)
trainer.global_step = 2
trainer.update(lambda: os.kill(os.getpid(), signal.SIGKILL))
