#: captures: yes
#: needs: torch
"""Exceptions in captured stages: tracebacks, groups, causes, and exceptions of torch."""

import traceback

import torch

torch._lazy_modules.discard("_inductor")  # or the first capture imports it, which takes longer than all else
from tinyrl import Trainer, evaluate


def chained():
    try:
        torch.ones(2) @ torch.ones(3)
    except RuntimeError as error:
        raise KeyError("chained") from error


def oom():
    raise torch.OutOfMemoryError("CUDA out of memory.")


def grouped():
    raise BaseExceptionGroup("several", [KeyboardInterrupt(), ValueError(1)])


trainer = Trainer()
for trainer.global_step, work in enumerate((chained, oom, grouped, lambda: torch.empty(2, 3) @ torch.empty(2)), 1):
    for call in (trainer.train_step, trainer.update, evaluate):
        try:
            call(inside=work)
        except BaseException as error:
            print(type(error), error.args, repr(error.__cause__), repr(error.__context__))
            traceback.print_exc()
