#: captures: yes
#: slow:
#: needs: torch
"""Tracers that record each operator around captured steps: their graphs contain none of autoprof's."""

import torch
from tinyrl import Trainer
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx


def step(x):
    return Trainer().train_step(lambda: x.mul(3).sum())


print(torch.func.grad(step)(torch.ones(2)))
print(make_fx(step)(torch.ones(2)).code)
print(make_fx(step, tracing_mode="fake")(torch.ones(2)).code)
with FakeTensorMode():
    print(step(torch.ones(2)))
