#: shell: $PYTHON broken_pipe.py | head -n 1
"""Pipe whose reader has ended."""

import sys

from tinyrl import Trainer

try:
    Trainer().fit(2000, lambda: print("x" * 1000))
except BrokenPipeError as error:
    print(repr(error), file=sys.stderr)
