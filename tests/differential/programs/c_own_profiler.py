#: captures: yes
#: needs: torch
"""A profiler of the user's own: around steps, in a stage, with a schedule; autoprof stands aside."""

import torch

torch._lazy_modules.discard("_inductor")  # or the first capture imports it, which takes longer than all else
from tinyrl import Trainer
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
with torch.autograd.profiler.profile() as old:
    work()
print(sum(event.count for event in old.key_averages() if event.key == "aten::mm"))
