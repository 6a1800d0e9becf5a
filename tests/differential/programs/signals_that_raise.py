#: slow:
#: set: AUTOPROF_MAX_STEPS=1000000
#: python: {script} Late
#: captures: no
#: python: {script} Frozen
#: captures: no
#: python: {script} TimeoutError
#: captures: no
#: python: {script} ConnectionError
#: captures: no
#: python: {script} KeyboardInterrupt
#: captures: no
#: python: {script} Late captured
#: captures: yes
#: needs: torch
#: python: {script} Frozen captured
#: captures: yes
#: needs: torch
#: python: {script} TimeoutError captured
#: captures: yes
#: needs: torch
#: python: {script} ConnectionError captured
#: captures: yes
#: needs: torch
"""Signal handler that raises around hooked calls, 4,000 times, or 300 times around captured ones.

No exception is lost or has a context.
"""

import dataclasses
import signal
import sys

captured = "captured" in sys.argv
if captured:
    import torch

    torch._lazy_modules.discard("_inductor")  # or the first capture imports it, which takes longer than all else
from tinyrl import Trainer


class Late(Exception):
    pass


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    after: int = 3


KINDS = (Late, Frozen, TimeoutError, ConnectionError, KeyboardInterrupt)
kind = {kind.__name__: kind for kind in KINDS}[sys.argv[1]]
alarms = caught = 0
contexts = set()


def late(number, frame):
    global alarms
    alarms += 1
    raise kind


trainer = Trainer()
trainer.fit(3, lambda: torch.ones(2).sum().item() if captured else None)
signal.signal(signal.SIGALRM, late)
times, first, further = (300, 0.0005, 0.0005) if captured else (4000, 0.0001, 0.00002)
for number in range(times):
    try:
        signal.setitimer(signal.ITIMER_REAL, first + number % 20 * further)
        while alarms == number:
            trainer.global_step += captured
            trainer.train_step()
    except kind as error:
        contexts.add(repr(error.__context__))
        caught += 1
print(alarms, caught, contexts)
