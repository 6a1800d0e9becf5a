#: captures: yes
#: needs: torch
"""All kinds of torch profilers of the program: around steps, in a stage, with a schedule, in other threads.

Each profiler records the same with autoprof on.
"""

import threading
import warnings

import torch

torch._lazy_modules.discard("_inductor")  # or the first capture imports it, which takes longer than all else
from tinyrl import Trainer
from torch.autograd import profiler_legacy
from torch.profiler import ProfilerActivity, profile, record_function, schedule


def work():
    with record_function("mine"):
        return torch.ones(8, 8).mm(torch.ones(8, 8)).sum().item()


print(Trainer().fit(2, work))
with profile(activities=[ProfilerActivity.CPU]) as profiler:
    print(Trainer().fit(2, work))
print({event.key: event.count for event in profiler.key_averages() if event.key in ("mine", "aten::mm")})
ready = []
with profile(
    activities=[ProfilerActivity.CPU], schedule=schedule(wait=1, warmup=1, active=1), on_trace_ready=ready.append
) as p:
    trainer = Trainer()
    for trainer.global_step in range(1, 5):
        trainer.train_step(work)
        p.step()
print(len(ready))


def nested():
    with profile(activities=[ProfilerActivity.CPU]) as inner:
        work()
    return sum(event.count for event in inner.key_averages() if event.key == "aten::mm")


print(Trainer().fit(2, nested))
warnings.simplefilter("ignore")


def multiplications(profiler):
    averages = profiler.key_averages() if hasattr(profiler, "key_averages") else ()
    return sum(event.count for event in averages if event.key == "aten::mm")


def profiled(make):
    with make() as profiler:
        work()
    return multiplications(profiler)


for make in (torch.autograd.profiler.profile, torch.autograd.profiler.emit_itt, profiler_legacy.profile):
    with make() as profiler:
        print(Trainer().fit(2, work))
    print(multiplications(profiler), Trainer().fit(1, lambda make=make: profiled(make)))


def threads(start):
    thread = threading.Thread(target=lambda: results.append(profiled(start)))
    thread.start()
    thread.join()


results = []
Trainer().fit(1, lambda: threads(profiler_legacy.profile))
with torch.autograd.profiler.profile() as profiler:
    thread = threading.Thread(target=lambda: results.append(Trainer().fit(1, work)))
    thread.start()
    thread.join()
    work()
print(results, multiplications(profiler), torch.autograd.profiler._is_profiler_enabled)
