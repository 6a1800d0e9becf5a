"""How long the end of a capture holds the training thread up, side by side with verl's own profiler, in one run.

    python bench/stop.py [RUNS] [MEGABYTES]

The same work, a trace of so many megabytes, is recorded by autoprof, by verl's profiler (verl.utils.profiler, its
own function and handler, which compress in the training thread), and by torch.profiler with plain JSON. Medians,
smallest and largest of the time from the end of the work until the thread goes on, and the ratio to verl's. What
autoprof writes meanwhile is measured too: by how much the same work is slower until the trace is there.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# A trace of the work below has so many bytes for each of its rounds (torch 2.13).
_BYTES_A_ROUND = 7050


def work(torch: Any, rounds: int) -> None:
    """Small matrix products, forward and backward."""
    x = torch.randn(32, 32, requires_grad=True)
    for begin in range(0, rounds, 500):
        y = x
        for _ in range(min(500, rounds - begin)):
            y = (y @ x).tanh()
        y.sum().backward()


def main(runs: int, megabytes: int) -> None:
    folder = Path(tempfile.mkdtemp())
    os.environ |= {"AUTOPROF": "1", "AUTOPROF_RUN_ID": "bench", "AUTOPROF_DIR": str(folder), "AUTOPROF_CONTENTS": "cpu"}
    import torch
    from verl.utils.profiler.torch_profile import get_torch_profiler

    from autoprof import capture, ending, runtime
    from autoprof.placement import Subject

    run = runtime.start()
    assert run is not None

    def autoprof() -> Callable[[], None]:
        recording = capture.begin(run, Subject(step=1, role="actor", stage="update_actor", rank=0))
        assert recording is not None
        return lambda: capture.end(recording)

    def verls() -> Callable[[], None]:
        profile = get_torch_profiler(["cpu"], str(folder / "verl"), role="actor")
        # Without a GPU torch would say for every capture that there is none.
        profile.activities.discard(torch.profiler.ProfilerActivity.CUDA)
        profile.start()
        return profile.stop

    def plain() -> Callable[[], None]:
        def save(profile: Any) -> None:
            profile.export_chrome_trace(str(folder / "plain.json"))

        profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], on_trace_ready=save)
        profile.start()
        return profile.stop

    rounds = megabytes * 1_000_000 // _BYTES_A_ROUND
    ways = {"verl's own profiler": verls, "torch.profiler, plain JSON": plain, "autoprof": autoprof}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    undisturbed: list[float] = []
    meanwhile: list[float] = []
    for turn in range(runs + 1):
        for name, begin in ways.items():
            end = begin()
            work(torch, rounds if turn else 100)
            started = time.perf_counter()
            end()
            held = time.perf_counter() - started
            if turn:  # the first sets Kineto up
                taken[name].append(held)
            if name == "autoprof" and turn:
                meanwhile.append(_timed(torch))
            ending.wait_for_files(run)
        size = (folder / "plain.json").stat().st_size
        if turn:
            undisturbed.append(_timed(torch))
    base = statistics.median(taken["verl's own profiler"])
    print(f"a trace of {size / 1e6:.0f} MB, {runs} runs, in turn\n")
    print(f"{'':28}{'median':>9}{'smallest':>10}{'largest':>9}{'to verl':>9}")
    for name, seconds in taken.items():
        middle = statistics.median(seconds)
        print(f"{name:28}{middle:7.2f} s{min(seconds):8.2f} s{max(seconds):7.2f} s{middle / base:9.2f}")
    slower = statistics.median(meanwhile) / statistics.median(undisturbed)
    print(f"\nthe same work while autoprof writes and compresses, to without: {slower:.2f}")
    shutil.rmtree(folder)


def _timed(torch: Any) -> float:
    started = time.perf_counter()
    work(torch, 4000)
    return time.perf_counter() - started


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5, int(sys.argv[2]) if len(sys.argv) > 2 else 120)
