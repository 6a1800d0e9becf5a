"""Fault that stops vLLM's scheduler in one step. The import probe imports this module in every process."""

import functools
import os
import time
from pathlib import Path

import wrapt

_FOLDER = Path(os.environ["STANDING"])
_ENGINE = int(os.environ["FAULTS"])


def _step():
    updates = _FOLDER / "updates"
    return 1 + (updates.stat().st_size if updates.exists() else 0)


def slow_schedule(schedule):
    """Return a function that waits in that step, until a file lets it continue, before it schedules."""

    @functools.wraps(schedule)
    def stand_still(self, *args, **options):
        end = time.monotonic() + 240
        while _step() == _ENGINE and not (_FOLDER / f"go_on_{_ENGINE}").exists() and time.monotonic() < end:
            time.sleep(0.2)
        return schedule(self, *args, **options)

    return stand_still


def _scheduler(module):
    module.Scheduler.schedule = slow_schedule(module.Scheduler.schedule)


wrapt.register_post_import_hook(_scheduler, "vllm.v1.core.sched.scheduler")
