"""Prints the microseconds of listening in a step, or of a peer: `listening.py CASE FOLDER`."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

# Seconds of one measurement, and the number of measurements. The smallest result counts, because it is disturbed least.
_SECONDS, _TIMES = 0.2, 7
_OLD = 1000


def microseconds(work: Callable[[], object]) -> float:
    """Return the microseconds of one call, with the loop around it."""

    def taken(calls: int) -> float:
        started = time.perf_counter_ns()
        for _ in range(calls):
            work()
        return (time.perf_counter_ns() - started) / calls / 1e3

    calls = max(10, int(_SECONDS * 1e6 / taken(10)))
    return min(taken(calls) for _ in range(_TIMES))


def listener(directory: Path) -> Callable[[], None]:
    """Return a function that does a trainer's work when a step begins. The old requests were read before."""
    from autoprof.rundir.layout import RunDir
    from autoprof.windows.chooser import Chooser

    run, chooser = RunDir(directory), Chooser(of_trainer=True)
    chooser.look(run, 1)
    return lambda: chooser.look(run, 1)


def main(case: str, folder: str) -> float:
    """Return the microseconds of one case."""
    directory = Path(tempfile.mkdtemp(dir=folder))
    control = directory / "control"
    control.mkdir()
    for number in range(_OLD if case in ("full", "listed") else 0):
        (control / f"{number}-1-00000000.json.taken").write_text("{}")
    if case == "stat":
        return microseconds(lambda: os.stat(control))
    if case == "listed":
        return microseconds(lambda: os.listdir(control))
    if case in ("empty", "full"):
        return microseconds(listener(directory))
    import ray

    from autoprof.run import cluster

    ray.init(address="local", num_cpus=1, include_dashboard=False, object_store_memory=100_000_000, log_to_driver=False)
    try:
        if case == "put":
            return microseconds(lambda: cluster.put("step/bench", b"x" * 100))
        actor = ray.remote(num_cpus=0)(_Actor).remote()
        return microseconds(lambda: ray.get(actor.work.remote()))
    finally:
        ray.shutdown()


class _Actor:
    def work(self) -> None:
        return None


if __name__ == "__main__":
    print(json.dumps({"Step": main(*sys.argv[1:])}))
