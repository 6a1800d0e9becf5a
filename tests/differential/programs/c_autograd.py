#: captures: yes
#: slow:
#: needs: torch
"""Autograd functions, hooks on tensors, checkpointing and anomaly detection in captured stages."""

import torch
from tinyrl import Trainer
from torch.utils.checkpoint import checkpoint


class Double(torch.autograd.Function):
    @staticmethod
    def forward(context, value):
        return value * 2

    @staticmethod
    def backward(context, gradient):
        return Trainer().update(lambda: gradient * 2)


def work():
    value = torch.ones(3, requires_grad=True)
    value.register_hook(lambda gradient: gradient + 1)
    with torch.autograd.set_detect_anomaly(True):
        checkpoint(lambda each: Double.apply(each).sin(), value, use_reentrant=False).sum().backward()
    return value.grad.tolist(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()


print(Trainer().fit(2, work))
with torch.no_grad():
    print(Trainer().fit(1, torch.is_grad_enabled), Trainer().fit(1, torch.is_autocast_enabled))
