"""The same work, recorded by autoprof and by torch.profiler; both sum up the trace of the latter.

autoprof's sums of the trace are compared with torch's own `key_averages` of the same recording, and the kernels in
autoprof's trace with those in torch's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.profiler

import autoprof
from bench.gpu.programs.common import arguments, say, synchronize, training


def averages(profile: Any, on_device: bool) -> dict[str, tuple[int, float]]:
    """Return calls and own µs by name from torch's sums, of devices or of the host's operators."""
    found = {}
    for event in profile.key_averages():
        if (event.device_type == torch.autograd.DeviceType.CPU) is on_device or getattr(
            event, "is_user_annotation", False
        ):
            continue
        # Before torch 2.4, the attribute had CUDA in its name.
        took = getattr(event, "self_device_time_total", None) if on_device else event.self_cpu_time_total
        found[event.key] = (event.count, float(event.self_cuda_time_total if took is None else took))
    return found


def summed(path: Path, on_device: bool) -> dict[str, tuple[int, float]]:
    """Return the same from autoprof's sums."""
    from autoprof.traces.summary import summarize

    sums = summarize(path)
    wanted = ("kernel", "gpu_memcpy", "gpu_memset") if on_device else ("cpu_op",)
    each = sums.kernels if on_device else sums.operators
    return {one.name: (one.calls, one.self_us) for one in each if one.category in wanted}


def main() -> None:
    device = arguments().device
    on_device = device != "cpu"
    step = training(device)
    step()

    def work() -> None:
        for _ in range(5):
            step()
        synchronize(device)

    with autoprof.step(1), autoprof.stage("update_actor", role="actor"):
        work()
    with torch.profiler.profile() as profile:
        work()
    path = Path("by_hand.json")
    profile.export_chrome_trace(str(path))
    theirs, ours = averages(profile, on_device), summed(path, on_device)
    names = sorted(set(theirs) & set(ours))
    say(
        names=len(names),
        missing=sorted(set(ours) - set(theirs)),
        calls=[sum(ours[name][0] for name in names), sum(theirs[name][0] for name in names)],
        unequal=[name for name in names if ours[name][0] != theirs[name][0]],
        own_us=[sum(ours[name][1] for name in names), sum(theirs[name][1] for name in names)],
        by_hand=str(path.resolve()),
    )


if __name__ == "__main__":
    main()
