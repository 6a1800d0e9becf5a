"""Captures of a run and the events in their traces, read without autoprof's code, to check its figures."""

from __future__ import annotations

import gzip
import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

# The name of a memory capture ends with `.memory`.
META, TRACE, SNAPSHOT = ".meta.json", ".pt.trace.json.gz", ".pickle"
KERNELS, COPIES = ("kernel",), ("gpu_memcpy", "gpu_memset")
# Kineto uses this name for HIP's runtime too.
RUNTIME = ("cuda_runtime", "cuda_driver")
_BACKWARD = "autograd::engine::evaluate_function"


class Event(NamedTuple):
    """Event with a duration. Times are in µs."""

    category: str
    name: str
    thread: tuple[Any, Any]
    start: float
    duration: float
    correlation: Any


class Trace:
    """Complete content of a Chrome trace."""

    def __init__(self, path: Path) -> None:
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rb") as file:
            self.whole: dict[str, Any] = json.load(file)
        self.raw: list[dict[str, Any]] = self.whole["traceEvents"]

    @cached_property
    def events(self) -> list[Event]:
        """Return the events that have a duration."""
        return [
            Event(
                event.get("cat", ""),
                event["name"],
                (event.get("pid"), event.get("tid")),
                float(event["ts"]),
                max(0.0, float(event.get("dur", 0))),
                event.get("args", {}).get("correlation"),
            )
            for event in self.raw
            if event.get("ph") == "X"
        ]

    def of(self, categories: Iterable[str]) -> list[Event]:
        """Return the events of these categories."""
        wanted = frozenset(categories)
        return [event for event in self.events if event.category in wanted]

    @property
    def kernels(self) -> list[Event]:
        return self.of(KERNELS)

    @property
    def copies(self) -> list[Event]:
        return self.of(COPIES)

    @property
    def runtime(self) -> list[Event]:
        return self.of(RUNTIME)

    def names(self, category: str) -> set[str]:
        """Return the names of a category's events."""
        return {event.name for event in self.of([category])}

    @cached_property
    def _backward(self) -> dict[Any, list[tuple[float, float]]]:
        """Return the times of autograd's backward pass, by thread."""
        inside: dict[Any, list[tuple[float, float]]] = defaultdict(list)
        for event in self.of(["cpu_op"]):
            if event.name.startswith(_BACKWARD):
                inside[event.thread].append((event.start, event.start + event.duration))
        return {thread: sorted(intervals) for thread, intervals in inside.items()}

    def in_backward(self, event: Event) -> bool:
        """Return True if a host event is inside autograd's backward pass."""
        intervals = self._backward.get(event.thread, [])
        at = bisect_right(intervals, (event.start, float("inf"))) - 1
        return at >= 0 and event.start <= intervals[at][1]

    def backward_and_forward(self) -> tuple[int, int]:
        """Return the number of kernels launched by autograd's backward pass, and by all other code.

        A kernel has the correlation id of the call that launched it.
        """
        calls = {event.correlation: event for event in self.runtime}
        launched = [call for kernel in self.kernels if (call := calls.get(kernel.correlation)) is not None]
        backward = sum(map(self.in_backward, launched))
        return backward, len(launched) - backward

    def recomputed(self) -> int:
        """Return the number of recomputed layers: in the backward pass, only recomputation calls `aten::linear`."""
        return sum(self.in_backward(event) for event in self.of(["cpu_op"]) if event.name == "aten::linear")

    def shaped(self) -> int:
        """Return the number of operators that have the shapes of their inputs."""
        return sum("Input Dims" in event.get("args", {}) for event in self.raw)

    def allocations(self) -> set[int]:
        """Return the device types with recorded allocations: 0 is the host."""
        found = (event for event in self.raw if event.get("name") == "[memory]")
        return {event.get("args", {}).get("Device Type", -1) for event in found}


class Capture:
    """Capture with its meta file and its trace."""

    def __init__(self, meta: Path) -> None:
        self._base = str(meta).removesuffix(META)
        self.name = meta.name.removesuffix(META)
        self.step = int(meta.parent.name.rpartition("_")[2])
        self.meta: dict[str, Any] = json.loads(meta.read_text())

    @property
    def stage(self) -> str:
        """Return role and stage, such as `actor.update_actor`."""
        return self.name.partition(".rank")[0]

    @property
    def path(self) -> Path:
        return Path(self._base + TRACE)

    @property
    def snapshot(self) -> Path:
        return Path(self._base + SNAPSHOT)

    @cached_property
    def trace(self) -> Trace:
        return Trace(self.path)


def captures(run: Path) -> list[Capture]:
    """Return the captures of a run, by step and name; merged traces are left out."""
    metas = sorted(run.glob(f"global_step_*/*{META}"))
    return [Capture(meta) for meta in metas if "merged" not in meta.name.split(".")]


def spans(run: Path, kind: str = "step") -> list[dict[str, Any]]:
    """Return the spans of one kind in the timeline of a run."""
    lines = (line for path in sorted(run.glob("journal/*.jsonl")) for line in path.read_text().splitlines())
    return [span for span in map(json.loads, lines) if span["kind"] == kind]
