#: captures: yes
#: slow:
#: needs: torch
"""Tensors in and after captured stages, which are freed as early as without autoprof."""

import gc
import weakref

import torch
from tinyrl import Trainer

references = []


class Batch(torch.Tensor):
    pass


def work(batch=None):
    activation = torch.ones(64, 64) * 2
    references.append(weakref.ref(activation))
    storage = activation.untyped_storage()
    references.append(weakref.ref(storage))
    return None


gc.disable()
trainer = Trainer()
for trainer.global_step in range(1, 4):
    batch = torch.ones(5).as_subclass(Batch)
    references.append(weakref.ref(batch))
    trainer.train_step(work)
    trainer.update(work, batch)
    del batch
    print([reference() is None for reference in references])
