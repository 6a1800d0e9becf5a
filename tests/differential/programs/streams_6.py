#: shell: exec $PYTHON streams_6.py 1>&- 2>&-
"""Closed standard output and standard error."""

import os
import sys

said = open("said", "w")
from tinyrl import Trainer


def work():
    print("prints")
    print("says", file=sys.stderr)
    opened = os.open("/dev/null", os.O_RDONLY)
    print(opened < 3, sys.stdin is None, sys.stdout is None, sys.stderr is None, file=said)
    os.close(opened)


try:
    Trainer().fit(inside=work)
except Exception as error:
    print(repr(error), file=said)
said.close()
