"""Times in which profilers recorded: work that is recorded takes longer, which is no finding."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from autoprof.base.intervals import Union
from autoprof.report.figures.reading import Timeline
from autoprof.rundir.captures import CaptureFile, Step


class Recorded:
    """The times of a run in which something was recorded, in ns on the clock of the driver's host.

    Attributes:
        anywhere: The times of all processes.
        steps: The steps with a capture in which a profiler recorded, or may have.
    """

    def __init__(self, steps: Iterable[Step] = (), shifts: Mapping[str, int] | None = None) -> None:
        self.anywhere = Union()
        self.steps: set[int] = set()
        # By host and process, and by replica: another process than the one that records tells of its requests.
        self._by: dict[tuple[str | int, int], Union] = defaultdict(Union)
        for step in steps:
            for capture in step.captures:
                if not capture.untraced:
                    self.steps.add(step.number)
                    self._add(capture, (shifts or {}).get(capture.meta.host, 0))

    def _add(self, capture: CaptureFile, shift: int) -> None:
        meta = capture.meta
        start, end = meta.clock.start.unix_ns, meta.clock.stop.unix_ns
        if not 0 < start < end:
            return
        self.anywhere.add(start + shift, end + shift)
        if meta.pid is not None:
            self._by[meta.host, meta.pid].add(start + shift, end + shift)
        if meta.replica is not None:
            self._by["replica", meta.replica].add(start + shift, end + shift)

    def of(self, process: Timeline, replica: int | None) -> Union:
        """Return the times in which a process was recorded, or the engine of the replica that it tells of."""
        return self._by.get((process.host, process.pid) if replica is None else ("replica", replica), Union())
