#: captures: yes
#: needs: torch
"""Threads with stacks too small for torch's profiler, and captured steps at the same time."""

import threading

import torch
from tinyrl import Trainer

found = []


def work():
    return torch.ones(8).sum().item()


for size in (32, 64, 128, 256):
    threading.stack_size(size * 1024)
    thread = threading.Thread(target=lambda: found.append(Trainer().fit(1, work)))
    thread.start()
    thread.join()
    print(size, found, Trainer().fit(1, work), threading.stack_size())
