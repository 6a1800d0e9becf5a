#: captures: yes
#: slow:
#: needs: torch
#: set: AUTOPROF_MAX_STEPS=1000000
#: python: {script} Late
#: python: {script} Frozen
#: python: {script} TimeoutError
#: python: {script} ConnectionError
"""Signal handler that raises around captured calls, 300 times: no exception is lost or has a context."""

import dataclasses
import signal
import sys

import torch

torch._lazy_modules.discard("_inductor")  # or the first capture imports it, which takes longer than all else
from tinyrl import Trainer


class Late(Exception):
    pass


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    after: int = 3


kind = {kind.__name__: kind for kind in (Late, Frozen, TimeoutError, ConnectionError)}[sys.argv[1]]
alarms = caught = 0
contexts = set()


def late(number, frame):
    global alarms
    alarms += 1
    raise kind


trainer = Trainer()
trainer.fit(3, lambda: torch.ones(2).sum().item())
signal.signal(signal.SIGALRM, late)
for number in range(300):
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0005 + number % 20 * 0.0005)
        while alarms == number:
            trainer.global_step += 1
            trainer.train_step()
    except kind as error:
        contexts.add(repr(error.__context__))
        caught += 1
print(alarms, caught, contexts)
