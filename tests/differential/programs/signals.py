"""Signal handlers around stages: for checkpoints, for the end of a run, with wakeup descriptors."""

import os
import signal
import time

from tinyrl import Trainer

said = []
signal.signal(signal.SIGUSR1, lambda number, frame: said.append(signal.Signals(number).name))
trainer = Trainer()
trainer.fit(inside=lambda: os.kill(os.getpid(), signal.SIGUSR1))
print(said)


class Stop(Exception):
    pass


def stop(number, frame):
    raise Stop(number)


signal.signal(signal.SIGTERM, stop)
try:
    trainer.fit(inside=lambda: os.kill(os.getpid(), signal.SIGTERM) or time.sleep(5))
except Stop as error:
    print(repr(error), error.__context__)
print([signal.getsignal(number) for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGCHLD, signal.SIGALRM)])
print(signal.pthread_sigmask(signal.SIG_BLOCK, []), signal.set_wakeup_fd(-1), signal.getitimer(signal.ITIMER_REAL))
signal.signal(signal.SIGALRM, lambda *_: said.append("alarm"))
signal.setitimer(signal.ITIMER_REAL, 0.1)
trainer.update(lambda: time.sleep(0.3))
print(said[-1])
