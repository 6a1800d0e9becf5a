#: captures: yes
#: slow:
#: needs: torch
"""Garbage collector in captured stages: it stays enabled and frozen as before, and frees objects in cycles."""

import gc
import weakref

import torch
from tinyrl import Trainer


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)
        self.itself = [self]


def work():
    model = Model()
    model(torch.ones(2)) if False else model.inner(torch.ones(2)).sum().backward()
    reference = weakref.ref(model)
    del model
    before = reference() is None
    gc.collect()
    return before, reference() is None, gc.isenabled(), gc.get_threshold()


print(Trainer().fit(2, work))
gc.disable()
print(Trainer().fit(2, work), gc.isenabled())
