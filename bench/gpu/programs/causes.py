"""Step with a planted cause in each stage: `compute`, `memory`, `copy`, `launch`, `idle`."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

import autoprof
from bench.gpu.facts import CAUSES
from bench.gpu.programs.common import arguments, say, synchronize


def planted(device: str) -> dict[str, Callable[[], object]]:
    """Return a piece of work for each cause, of a few milliseconds."""
    gpu = device != "cpu"
    side, megabytes = (4096, 256) if gpu else (32, 1)
    matrix = torch.ones(side, side, device=device, dtype=torch.bfloat16 if gpu else torch.float32)
    large = torch.zeros(megabytes << 18, device=device)
    host = torch.zeros(megabytes << 18, pin_memory=gpu)
    small = torch.zeros(8, device=device)

    def compute() -> None:
        for _ in range(10):
            matrix @ matrix
        synchronize(device)

    def memory() -> None:
        for _ in range(10):
            large.add_(1.0)
        synchronize(device)

    def copy() -> None:
        large.copy_(host, non_blocking=True)
        synchronize(device)

    def launch() -> None:
        # For each launch, the host takes a hundred times as long as the device.
        for _ in range(10):
            small.add_(1.0)
            sum(range(5000))

    return {"compute": compute, "memory": memory, "copy": copy, "launch": launch, "idle": lambda: time.sleep(0.01)}


def main() -> None:
    parsed = arguments(seconds=1.6)
    work = planted(parsed.device)
    for do in work.values():
        do()
    synchronize(parsed.device)
    took = {}
    with autoprof.step(1):
        for cause in CAUSES:
            with autoprof.stage(cause, role="actor"):
                began = time.monotonic()
                while time.monotonic() - began < parsed.seconds:
                    work[cause]()
                if cause == "idle":
                    work["launch"]()  # a device without any work is not in the trace
                synchronize(parsed.device)
                took[cause] = time.monotonic() - began
    say(took=took)


if __name__ == "__main__":
    main()
