"""Ctrl-C in a stage ends the program as it does."""

import os
import signal

from tinyrl import Trainer

Trainer().fit(inside=lambda: os.kill(os.getpid(), signal.SIGINT))
