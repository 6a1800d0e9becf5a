"""Trains for as many steps as its argument says, 4 without one."""

import sys

from small_trainer import Trainer

Trainer().fit(int(sys.argv[1]) if len(sys.argv) > 1 else 4)
