#: slow:
#: captures: no
#: python: {script} Late
#: python: {script} Frozen
#: python: {script} TimeoutError
#: python: {script} ConnectionError
"""Signal handler that raises around hooked calls, 4,000 times: no exception is lost or has a context."""

import dataclasses
import signal
import sys

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
trainer.fit()
signal.signal(signal.SIGALRM, late)
for number in range(4000):
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0001 + number % 20 * 0.00002)
        while alarms == number:
            trainer.train_step()
    except kind as error:
        contexts.add(repr(error.__context__))
        caught += 1
print(alarms, caught, contexts)
