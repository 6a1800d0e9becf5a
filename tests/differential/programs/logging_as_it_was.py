"""Root logger of the user with its handlers and levels."""

import logging
import sys

from tinyrl import Trainer

print(logging.root.handlers, logging.root.level, logging.lastResort.level, logging.getLogger().hasHandlers())
Trainer().fit(inside=lambda: logging.getLogger("mine").warning("before basicConfig"))
logging.basicConfig(format="%(levelname)s %(name)s %(funcName)s %(message)s", level="DEBUG", stream=sys.stdout)
print(len(logging.root.handlers))


def say():
    logging.info("from a stage")
    logging.getLogger("tinyrl").debug("debug")


Trainer().fit(inside=say)
logging.shutdown()
