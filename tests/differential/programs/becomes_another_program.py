#: python: {script} python
#: python: {script} trainer
#: python: {script} fails
#: python: {script} raises
#: python: {script} shell
"""Program that calls os.exec, with autoprof in its environment or without Python."""

import os
import sys

NEXT = {
    "python": [sys.executable, "-c", "print('next')"],
    "trainer": [sys.executable, "-c", "from tinyrl import Trainer; print('next', Trainer().fit())"],
    "fails": [sys.executable, "-c", "import sys; sys.exit(3)"],
    "raises": [sys.executable, "-c", "raise ValueError('next')"],
    "shell": ["/bin/sh", "-c", "echo next; exit 4"],
}

from tinyrl import Trainer

print(Trainer().fit(), flush=True)
os.execv(NEXT[sys.argv[1]][0], NEXT[sys.argv[1]])
