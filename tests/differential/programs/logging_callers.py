#: differs: stacklevel counts the wrapper's frames, so the record names a function of autoprof
"""Log record with the caller of a hooked function."""

import logging
import sys

from tinyrl import Trainer

logging.basicConfig(format="%(filename)s %(funcName)s %(message)s", stream=sys.stdout)


def step():
    Trainer().update(lambda: logging.warning("called", stacklevel=3))


step()
