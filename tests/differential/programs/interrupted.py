"""Ctrl-C in a stage, which ends the program as without autoprof."""

import os
import signal

from tinyrl import Trainer

Trainer().fit(inside=lambda: os.kill(os.getpid(), signal.SIGINT))
