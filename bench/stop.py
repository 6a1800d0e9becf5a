"""How long the training thread waits for the end of a capture, side by side with torch's own way, in one run.

    python bench/stop.py [RUNS]

The same work is recorded by autoprof (stop, plain JSON, another process compresses) and by torch.profiler as its
TensorBoard handler writes it (stop, JSON, gzip in the training thread). Medians of the time from the end of the work
until the thread goes on, and the ratio.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable


def work(torch: object) -> None:
    """Some 20,000 events: small matrix products, forward and backward."""
    x = torch.randn(32, 32, requires_grad=True)  # type: ignore[attr-defined]
    y = x
    for _ in range(1500):
        y = (y @ x).tanh()
    y.sum().backward()


def main(runs: int) -> None:
    folder = tempfile.mkdtemp()
    os.environ |= {"AUTOPROF": "1", "AUTOPROF_RUN_ID": "bench", "AUTOPROF_DIR": folder}
    import torch

    from autoprof import capture, runtime
    from autoprof.placement import Subject

    run = runtime.start()
    assert run is not None

    def autoprof() -> Callable[[], None]:
        recording = capture.begin(run, Subject(step=1, role="actor", stage="update_actor", rank=0))
        assert recording is not None
        return lambda: capture.end(recording)

    def torchs_own() -> Callable[[], None]:
        handler = torch.profiler.tensorboard_trace_handler(folder, use_gzip=True)
        profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], on_trace_ready=handler)
        profile.start()
        return profile.stop

    taken: dict[str, list[float]] = {"torch, .json.gz in the thread": [], "autoprof": []}
    for turn in range(runs + 1):
        for name, begin in zip(taken, (torchs_own, autoprof), strict=True):
            end = begin()
            work(torch)
            started = time.perf_counter()
            end()
            if turn:  # the first sets Kineto up
                taken[name].append(time.perf_counter() - started)
            time.sleep(1.0)  # let the process that compresses finish: it is not what is measured
    base = statistics.median(taken["autoprof"])
    for name, seconds in taken.items():
        print(f"{name:32}{statistics.median(seconds) * 1e3:8.0f} ms{statistics.median(seconds) / base:8.2f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
