"""Prints the milliseconds of a step of a trainer with COUNT actors as JSON: `growth.py COUNT TURNS`."""

import json
import os
import statistics
import sys
import time
from collections import Counter
from pathlib import Path

import ray
from growing import Trainer, Worker

from autoprof.run import cluster as ray_kv
from autoprof.run import runtime
from bench.growth import BROADCAST, FOUND, INSIDE, OUTSIDE

# Repetitions of each case in a turn. The median of their times is the value of the turn.
REPEATS = 11
# Number of actors that are started at the same time.
AT_A_TIME = 16

count, turns = int(sys.argv[1]), int(sys.argv[2])
ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100_000_000, log_to_driver=False)
workers = []
while len(workers) < count:
    more = [Worker.remote() for _ in range(min(AT_A_TIME, count - len(workers)))]
    ray.get([worker.nothing.remote() for worker in more])
    workers += more


def broadcast():
    ray.get([worker.nothing.remote() for worker in workers])


trainer = Trainer(workers)
trainer.step()
run = runtime.current()


def step(captured):
    trainer.global_step += 1
    if (trainer.global_step % 2 == 0) != captured:
        trainer.global_step += 1
    trainer.step()


def took(work):
    found = []
    for _ in range(REPEATS):
        broadcast()  # wait until earlier calls are done
        begun = time.perf_counter()
        work()
        found.append((time.perf_counter() - begun) * 1e3)
    return statistics.median(found)


cases = {BROADCAST: broadcast, OUTSIDE: lambda: step(False), INSIDE: lambda: step(True)}
values = {case: [] for case in cases}
for turn in range(-1, turns):
    order = list(cases) if turn % 2 else list(cases)[::-1]
    for case in order:
        value = took(cases[case])
        if turn >= 0:
            values[case].append(value)


class Counted:
    """Ray's key-value store. It counts the calls of its functions."""

    def __init__(self, kv):
        self._kv = kv

    def __getattr__(self, name):
        kinds = {"put": "entries written", "get": "entries read", "list": "lists read", "del": "entries deleted"}
        counts[kinds[name.rpartition("_")[2]]] += 1
        return getattr(self._kv, name)


def counting(name):
    function = getattr(os, name)

    def counted(path=".", *more, **named):
        if str(path).startswith(str(run.rundir.control)):
            counts["looks at control/"] += 1
        return function(path, *more, **named)

    setattr(os, name, counted)


def files():
    return sum(path.is_file() for path in Path(run.rundir.path).rglob("*"))


counts = Counter()
kv = ray_kv._kv
ray_kv._kv = lambda: Counted(kv())
for name in ("stat", "lstat", "listdir", "scandir", "open"):
    counting(name)
did = {}
for case in (OUTSIDE, INSIDE):
    counts.clear()
    before = files()
    for _ in range(REPEATS):
        cases[case]()
    named = ("looks at control/", "entries written", "entries read", "lists read", "entries deleted")
    did[case] = {"files made": (files() - before) / REPEATS} | {name: counts[name] / REPEATS for name in named}


def pss_mb(pid):
    text = Path("/proc", str(pid), "smaps_rollup").read_text()
    return int(text.partition("\nPss:")[2].split()[0]) / 1e3


pids = ray.get([worker.__ray_call__.remote(lambda self: __import__("os").getpid()) for worker in workers[:8]])
print(FOUND + json.dumps({"values": values, "counts": did, "worker_mb": statistics.median(map(pss_mb, pids))}))
