"""SIGTERM in a stage ends the process by the signal."""

import os
import signal

from tinyrl import Trainer

print("begins", flush=True)
Trainer().fit(inside=lambda: os.kill(os.getpid(), signal.SIGTERM))
