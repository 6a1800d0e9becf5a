#: captures: yes
#: needs: torch
#: set: MALLOC_MMAP_THRESHOLD_=4096
"""Ranges of stages and of the program's profilers that begin in one recording and end in another.

At the end of a range, torch must not write to memory that the program has allocated since.
"""

import warnings

import torch

torch._lazy_modules.discard("_inductor")  # or the first capture imports it, which takes longer than all else
from tinyrl import Trainer
from torch.autograd import profiler_legacy
from torch.autograd.profiler import emit_itt
from torch.profiler import ProfilerActivity, profile, record_function

warnings.simplefilter("ignore")
KINDS = (lambda: profile(activities=[ProfilerActivity.CPU]), profiler_legacy.profile, emit_itt)
enter = record_function.__enter__


def begun(name):
    torch.ones(2).sum()
    found = record_function(name)
    found.__enter__()
    return found


def end(found):
    found.__exit__(None, None, None)


def seen(profiler):
    return sorted({event.key for event in getattr(profiler, "key_averages", list)()})


def fit(inside):
    trainer = Trainer()
    for trainer.global_step in (1, 2, 3):
        taken = [bytearray(8000) for _ in range(1000)]
        print(trainer.train_step(inside), all(part == bytes(8000) for part in taken))


# A range begins in each stage. It ends in the next one, or is dropped three stages later.
ranges = []


def stage():
    if len(ranges) % 2:
        end(ranges[-1])
    if len(ranges) > 3:
        ranges[-3] = None
    ranges.append(begun("stage"))
    return len(ranges)


fit(stage)

# A range begins in a profiler of the program, and ends in a stage.
for kind in KINDS:
    with kind() as profiler:
        left = begun("left")
    fit(lambda left=left: end(left))
    print(seen(profiler))

# A range begins in a stage, and ends in a profiler of the program that the stage starts.
opened = []


def starts_and_stops():
    if not opened:
        opened.extend((begun("stage"), kind()))
        opened[1].__enter__()
        end(begun("own"))
    else:
        end(opened[0])
        opened[1].__exit__(None, None, None)
        print(seen(opened[1]))
        opened.clear()


for kind in KINDS:
    fit(starts_and_stops)
print(record_function.__enter__ is enter)
