#: captures: yes
#: needs: torch
"""Modes and transforms of the program that see each operator, but none of autoprof's, around captured steps."""

import torch

torch._lazy_modules.discard("_inductor")  # or the first capture imports it, which takes longer than all else
from tinyrl import Trainer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class Dispatched(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls):
        return False  # or the first operator imports torch._dynamo

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        print("dispatched", function)
        return function(*args, **(kwargs or {}))


class Called(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        print("called", getattr(function, "__name__", function))
        return function(*args, **(kwargs or {}))


def step(x):
    return Trainer().train_step(lambda: x.mul(3).sum())


x = torch.ones(2, requires_grad=True)
for mode in (Dispatched(), Called(), torch.inference_mode(), torch.autograd.detect_anomaly(check_nan=True)):
    with mode:
        print(step(x).tolist())
print(torch.func.vmap(step)(torch.ones(2, 2)))
print(torch.jit.trace(step, torch.ones(2)).graph)
