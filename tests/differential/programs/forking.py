"""os.fork outside and inside of stages, with stages in the child, which exits in different ways."""

import os
import sys

from tinyrl import Trainer


def fork(leave):
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        print("child", Trainer().fit(1), flush=True)
        leave()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


print(fork(lambda: os._exit(3)))
print(Trainer().update(fork, lambda: os._exit(4)))
print(Trainer().fit(1, lambda: fork(lambda: os._exit(5))))
print(Trainer().update(fork, lambda: sys.exit(6)))
print(Trainer().update(fork, lambda: 1 / 0))
