"""Durations of the same work: alone, in a step outside of windows, in a captured stage, and in torch.profiler by hand.

The cases take turns.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import torch.profiler

import autoprof
from bench.gpu.programs.common import arguments, say, synchronize, training

# Steps from here on are in no window.
OUTSIDE = 1000


def main() -> None:
    parsed = arguments(turns=7, rounds=100)
    step = training(parsed.device)
    took: dict[str, list[float]] = defaultdict(list)

    def work() -> None:
        for _ in range(parsed.rounds):
            step()
        synchronize(parsed.device)

    def alone() -> None:
        began = time.perf_counter()
        work()
        took["alone"].append(time.perf_counter() - began)

    def outside(number: int) -> None:
        began = time.perf_counter()
        with autoprof.step(OUTSIDE + number), autoprof.stage("update_actor", role="actor"):
            work()
        took["outside"].append(time.perf_counter() - began)

    def captured(number: int) -> None:
        with autoprof.step(number):
            began = time.perf_counter()
            with autoprof.stage("update_actor", role="actor"):
                work()
                worked = time.perf_counter()
            ended = time.perf_counter()
        took["captured"].append(ended - began)
        took["captured stop"].append(ended - worked)

    def by_hand(folder: str) -> None:
        began = time.perf_counter()
        profile = torch.profiler.profile()
        profile.start()
        work()
        worked = time.perf_counter()
        profile.stop()
        profile.export_chrome_trace(str(Path(folder) / "by_hand.json"))
        ended = time.perf_counter()
        took["by hand"].append(ended - began)
        took["by hand stop"].append(ended - worked)

    with tempfile.TemporaryDirectory() as folder:
        for turn in range(parsed.turns + 1):
            alone()
            outside(turn)
            captured(turn)
            by_hand(folder)
    # The first turn sets Kineto up.
    say(medians={name: statistics.median(values[1:]) for name, values in took.items()})


if __name__ == "__main__":
    main()
