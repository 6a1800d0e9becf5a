#: captures: yes
#: needs: torch
#: set: AUTOPROF_CONTENTS=cpu,stack
"""cProfile, profile and trace functions, set before a captured step or in it, while stacks are recorded."""

import cProfile
import pstats
import sys
import threading

import torch

torch._lazy_modules.discard("_inductor")  # or the first capture imports it, which takes longer than all else
from tinyrl import Trainer


def work():
    return torch.ones(2).add(1).sum().item()


def calls(profiler):
    stats = pstats.Stats(profiler).stats
    return sorted((key[2], value[1]) for key, value in stats.items() if key[0] == __file__ or "trainer.py" in key[0])


def step(inside=work):
    return Trainer().train_step(inside)


print(step())
profiler = cProfile.Profile()
print(profiler.runcall(step), calls(profiler))
profiler = cProfile.Profile()
profiler.enable()
step()
print(sys.getprofile() is None)
work()
profiler.disable()
print(calls(profiler))

seen = []


def note(frame, event, argument):
    if event == "call" and frame.f_code is work.__code__:
        seen.append(event)


for set_function in (sys.setprofile, threading.setprofile, sys.settrace):
    set_function(note)
    step()
    print(sys.getprofile() is note, threading.getprofile() is note, sys.gettrace() is note, len(seen))
    set_function(None)
threading.setprofile(note)
thread = threading.Thread(target=step)
thread.start()
thread.join()
print(len(seen))
threading.setprofile(None)

started = cProfile.Profile()
step(lambda: started.enable() if sys.version_info < (3, 12) and sys.getprofile() is not started else None)
work()
print(sys.getprofile() is started)
started.disable()
print(calls(started))
step(lambda: sys.setprofile(note))
work()
print(sys.getprofile() is note, len(seen))
sys.setprofile(None)
print(step(lambda: cProfile.Profile().runcall(work)))
