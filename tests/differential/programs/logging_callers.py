#: differs: stacklevel counts the wrapper's frames: the record names a function of autoprof's
"""A log record with the caller of a hooked function."""

import logging
import sys

from tinyrl import Trainer

logging.basicConfig(format="%(filename)s %(funcName)s %(message)s", stream=sys.stdout)


def step():
    Trainer().update(lambda: logging.warning("called", stacklevel=3))


step()
