"""A coroutine that nobody awaits says so, at the place where it was made."""

import gc
import sys

from tinyrl import Trainer

Trainer().agenerate()
gc.collect()
sys.set_coroutine_origin_tracking_depth(2)
Trainer().sample(1)
gc.collect()
Trainer().fit()
