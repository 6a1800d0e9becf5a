"""SIGTERM in a stage, which ends the process by this signal."""

import os
import signal

from tinyrl import Trainer

print("begins", flush=True)
Trainer().fit(inside=lambda: os.kill(os.getpid(), signal.SIGTERM))
