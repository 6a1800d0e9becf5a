"""Sums of real traces of GPUs, made in two ways: `python -m bench.gpu.public FOLDER > bench/GPU_TRACES.md`.

The folder has published traces. Only their figures are kept, not the files. The second way reads the whole trace and
adds intervals one by one, while `autoprof/traces/` streams.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from autoprof.traces.summary import TraceSums, summarize
from bench.gpu.captures import COPIES, KERNELS, Event, Trace

_HEAD = """\
# Real traces of GPUs

Made by `python -m bench.gpu.public FOLDER`, from traces that HolisticTraceAnalysis publishes with its tests
(facebookresearch/HolisticTraceAnalysis, f4d0062). autoprof's sums of each device are compared with sums that are made
in another way. “same” means: the same kernels with as many calls, and each time within 0.1 %.

| trace | device | kernels and copies | busy | compute | communication | copies | waited for | |
|---|---|---|---|---|---|---|---|---|
"""
_COMMUNICATION = ("nccl", "rccl")


class Sums(NamedTuple):
    """Sums of one device, in µs."""

    events: int
    busy: float
    compute: float
    communication: float
    copies: float


def length(events: Iterable[Event]) -> float:
    """Return the time in µs in which at least one of these events ran."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted((event.start, event.start + event.duration) for event in events):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def by_device(trace: Trace) -> dict[Any, Sums]:
    """Return the sums of each device."""
    kernels: dict[Any, list[Event]] = defaultdict(list)
    copies: dict[Any, list[Event]] = defaultdict(list)
    for event in trace.of((*KERNELS, *COPIES)):
        (kernels if event.category in KERNELS else copies)[event.thread[0]].append(event)
    found = {}
    for device in {*kernels, *copies}:
        talks = [event for event in kernels[device] if any(word in event.name.lower() for word in _COMMUNICATION)]
        works = [event for event in kernels[device] if event not in set(talks)]
        every = [*kernels[device], *copies[device]]
        found[device] = Sums(len(every), length(every), length(works), length(talks), length(copies[device]))
    return found


def same(sums: TraceSums, trace: Trace) -> bool:
    """Return True if autoprof's sums equal the sums made here."""
    theirs = by_device(trace)
    ours = {
        device.device: Sums(device.events, device.busy_us, device.compute_us, device.communication_us, device.copy_us)
        for device in sums.devices
    }
    if ours.keys() != theirs.keys():
        return False
    calls = Counter(event.name for event in trace.of((*KERNELS, *COPIES)))
    listed: Counter[str] = Counter()
    for each in sums.kernels:
        if each.category in (*KERNELS, *COPIES):
            listed[each.name] += each.calls
    near = all(
        abs(mine - other) <= 0.001 * max(other, 1.0)
        for device in ours
        for mine, other in zip(ours[device], theirs[device], strict=True)
    )
    return near and listed == calls


def lines(path: Path) -> list[str]:
    """Return the rows of one trace, one per device."""
    sums, trace = summarize(path), Trace(path)
    names = {each.get("id"): each.get("name", "") for each in trace.whole.get("deviceProperties", [])}
    result = "same" if same(sums, trace) else "DIFFERENT"
    name = path.name.partition(".json")[0]
    found = []
    for device in sums.devices:
        times = (device.busy_us, device.compute_us, device.communication_us, device.copy_us)
        shares = [f"{time / device.span_us:.1%}" if device.span_us else "" for time in times]
        cells = [name, names.get(device.device) or device.name, str(device.events), *shares]
        found.append(f"| {' | '.join([*cells, sums.bound or 'neither', result])} |")
    return found


def main(folder: Path) -> None:
    """Print the page for the traces of a folder."""
    rows = [line for path in sorted(folder.iterdir()) if path.stat().st_size for line in lines(path)]
    sys.stdout.write(_HEAD + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
