"""os.wait and SIGCHLD, which see only the program's own children."""

import os
import signal
import time

from tinyrl import Trainer

ended = []
signal.signal(signal.SIGCHLD, lambda *_: ended.append(1))
Trainer().fit()
time.sleep(0.5)
print(ended)
try:
    print(os.wait())
except ChildProcessError as error:
    print(error)
pid = os.fork()
if pid == 0:
    os._exit(3)
found, status = os.wait()
print(found == pid, status, Trainer().fit())
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError as error:
    print(error)
