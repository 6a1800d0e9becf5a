#: python: -
#: stdin: {script}
"""Program that is read from standard input."""

import sys

from tinyrl import Trainer

print(Trainer().fit(), sys.argv, __name__, "__file__" in globals())
Trainer().fit(1, lambda: 1 / 0)
