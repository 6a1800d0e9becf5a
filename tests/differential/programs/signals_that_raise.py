#: slow:
#: captures: no
"""A watchdog's handler raises around hooked calls, again and again: none is lost, none has a context."""

import signal

from tinyrl import Trainer


class Late(Exception):
    pass


alarms = caught = 0
contexts = set()


def late(number, frame):
    global alarms
    alarms += 1
    raise Late


trainer = Trainer()
trainer.fit()
signal.signal(signal.SIGALRM, late)
for number in range(2000):
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0001 + number % 20 * 0.00002)
        while alarms == number:
            trainer.train_step()
    except Late as error:
        contexts.add(repr(error.__context__))
        caught += 1
print(alarms, caught, contexts)
