#: slow:
#: captures: no
"""Ctrl-C at any moment of a step: a KeyboardInterrupt without an error of autoprof in its context."""

import signal

from tinyrl import Trainer


alarms = caught = 0
contexts = set()


def late(number, frame):
    global alarms
    alarms += 1
    raise KeyboardInterrupt


trainer = Trainer()
trainer.fit()
signal.signal(signal.SIGALRM, late)
for number in range(2000):
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0001 + number % 20 * 0.00002)
        while alarms == number:
            trainer.train_step()
    except KeyboardInterrupt as error:
        contexts.add(repr(error.__context__))
        caught += 1
print(alarms, caught, contexts)
