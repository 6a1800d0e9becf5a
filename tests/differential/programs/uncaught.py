"""Uncaught exception: its traceback on stderr, and status 1."""

import atexit

from tinyrl import Trainer

atexit.register(print, "at exit")


def fail():
    raise ConnectionError("lost") from OSError(5, "why")


Trainer().fit(inside=fail)
