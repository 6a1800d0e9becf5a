"""Warnings about coroutines that are never awaited, with the place where they were created."""

import gc
import sys

from tinyrl import Trainer

Trainer().agenerate()
gc.collect()
sys.set_coroutine_origin_tracking_depth(2)
Trainer().sample(1)
gc.collect()
Trainer().fit()
