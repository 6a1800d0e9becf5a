#: captures: no
"""Limit of processes, so that no thread and no process can start. The limit does not apply to root."""

import os
import resource
import threading

from tinyrl import Trainer

Trainer().fit(1)
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
try:
    threading.Thread(target=print, args=("runs",)).start()
except RuntimeError as error:
    print(error)
try:
    os.fork()
except OSError as error:
    print(error)
print(Trainer().fit())
