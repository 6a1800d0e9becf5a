#: functions:
#: captures: yes
#: needs: torch
#: slow:
"""Ends of a process in a captured stage or immediately after it."""

import atexit
import os
import signal
import sys

import torch
from tinyrl import Trainer, evaluate

torch._lazy_modules.discard("_inductor")  # or the first capture imports it, which takes longer than all else


def leaves():
    """sys.exit in a captured stage."""
    Trainer().fit(inside=lambda: sys.exit(int(torch.ones(3).sum())))


def exit_while_writing():
    """os._exit immediately after a captured step."""
    print(Trainer().fit(2, lambda: torch.ones(2).sum().item()), flush=True)
    os._exit(6)


def interrupted():
    """Ctrl-C in a captured stage."""
    Trainer().fit(inside=lambda: (torch.ones(2), os.kill(os.getpid(), signal.SIGINT)))


def killed():
    """Process that kills itself in a captured stage."""
    print(torch.ones(2), flush=True)
    trainer = Trainer()
    trainer.fit(1)
    trainer.global_step = 2
    trainer.update(lambda: os.kill(os.getpid(), signal.SIGKILL))


def terminated():
    """SIGTERM in a captured stage, without a handler, and with one that saves a checkpoint and exits."""
    trainer = Trainer()

    def save(number, frame):
        torch.save({"step": trainer.global_step}, "checkpoint.pt")
        print("saved", flush=True)
        sys.exit(143)

    signal.signal(signal.SIGTERM, save)
    trainer.fit(inside=lambda: os.kill(os.getpid(), signal.SIGTERM))


def uncaught():
    """Uncaught exception in a captured stage, with functions registered at exit."""
    atexit.register(print, "at exit")
    Trainer().fit(inside=lambda: torch.ones(2) @ torch.ones(3))


def recursion():
    """Endless recursion in a captured stage, and nested stages."""
    trainer = Trainer()

    def endless():
        return endless()

    try:
        trainer.fit(inside=endless)
    except RecursionError as error:
        print(error, error.__context__)
    trainer.global_step = 2
    print(trainer.train_step(lambda: trainer.update(lambda: evaluate(lambda: torch.ones(2).sum().item()))))
    print(trainer.update(lambda: trainer.generate(lambda: trainer.train_step(lambda: 5))))


globals()[sys.argv[1]]()
