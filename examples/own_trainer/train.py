"""Script that trains for the given number of steps, 4 by default."""

import sys

from small_trainer import Trainer

Trainer().fit(int(sys.argv[1]) if len(sys.argv) > 1 else 4)
