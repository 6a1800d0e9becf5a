"""Exit status after SystemExit or os._exit at exit."""

import atexit
import os
import sys

from tinyrl import Trainer

Trainer().fit()
atexit.register(os._exit, 9)
atexit.register(sys.stdout.flush)
atexit.register(Trainer().update, lambda: sys.exit(4))
print("ends")
