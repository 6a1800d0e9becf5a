"""os._exit in a stage, with flushed output."""

import os
import sys

from tinyrl import Trainer


def leave():
    print("leaves", flush=True)
    print("is lost", end="")
    os._exit(5)


Trainer().fit(inside=leave)
sys.exit(1)
