#: hooks: unseen
"""Files beside the script with the names of modules of the standard library."""

import queue
import statistics

from tinyrl import Trainer

print(Trainer().fit(), queue.MINE, statistics.MINE)
