#: captures: yes
#: needs: torch
#: needs: freezegun
"""Frozen clock that advances with each reading, around captured steps and in them."""

import datetime
import time

import torch
from freezegun import freeze_time
from tinyrl import Trainer, evaluate


def times():
    return time.time(), time.monotonic(), time.perf_counter_ns(), datetime.datetime.now()


def profiled():
    with torch.profiler.profile():
        torch.ones(8)


trainer = Trainer()
profiled()
with freeze_time("2020-01-01", auto_tick_seconds=15):
    print(times(), trainer.fit(2, times), evaluate(times), times())
    # torch also reads the clock for the program's own profiler.
    profiled()
    print(times())
print(trainer.fit(1, lambda: time.time() > 1.7e9))
with freeze_time("2021-01-01", auto_tick_seconds=15):
    print(times(), trainer.fit(2, times), times())
frozen = freeze_time("2022-01-01", auto_tick_seconds=15)
trainer.fit(1, frozen.start)
print(times(), trainer.fit(1, frozen.stop), time.time() > 1.7e9)
