#: captures: yes
#: needs: torch
#: set: MALLOC_MMAP_THRESHOLD_=4096
#: python: {script} discrete
#: python: {script} continuous
#: set: AUTOPROF_MODE=continuous
"""Profiler of the program that waits while autoprof records: `step()` ends a range of an earlier recording.

torch must not write to memory that the program has allocated since. The profiler records the same as without autoprof.
"""

import torch

torch._lazy_modules.discard("_inductor")  # or the first capture imports it, which takes longer than all else
from tinyrl import Trainer
from torch.profiler import ProfilerActivity, profile, schedule


def show(profiler):
    print(sorted({event.name() for event in profiler.profiler.kineto_results.events()}))


def stage():
    profiler.step()
    return torch.ones(8, 8).mm(torch.ones(8, 8)).sum().item()


def fit(steps):
    trainer = Trainer()
    for trainer.global_step in range(1, steps + 1):
        taken = [bytearray(8000) for _ in range(1000)]
        print(trainer.train_step(stage), all(part == bytes(8000) for part in taken))


for steps in (schedule(wait=5, warmup=1, active=2), schedule(wait=0, warmup=1, active=1, repeat=2, skip_first=1)):
    with profile(activities=[ProfilerActivity.CPU], schedule=steps, on_trace_ready=show) as profiler:
        fit(5)
