"""Attempts at a run: killed and resumed, it repeats the steps since its last checkpoint, and their numbers."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter

from autoprof.rundir.lines import PROCESS, Line

EVER = 1 << 63
_DRIVES = ("step", "timer", "stage")


def is_of(line: Line, since_ns: int, until_ns: int) -> bool:
    """Return whether a line is of the attempt that lies between two moments."""
    return line.end_ns > since_ns and line.start_ns < until_ns


class Attempts:
    """The times from which on a run's trainers were at work, each until all of them had ended.

    Attributes:
        starts: When each attempt began, once all lines are there.
        first_steps: The start of the first step that each start of a process ended.
    """

    def __init__(self) -> None:
        # By file and how many processes have begun it, since pids come again: first start and last end.
        self._lives: dict[tuple[int, int], tuple[int, int]] = {}
        self._begun: Counter[int] = Counter()
        self._stepped: set[tuple[int, int]] = set()
        self.starts: list[int] = []
        self.first_steps: set[int] = set()

    def add(self, file: int, line: Line) -> None:
        """Take a line; those of a file come in their order."""
        if line.kind == PROCESS:
            self._begun[file] += 1
            return
        if line.kind == "step" and (life := (file, self._begun[file])) not in self._stepped:
            self._stepped.add(life)
            self.first_steps.add(line.start_ns)
        if line.role == "trainer" and line.kind in _DRIVES:
            life = file, self._begun[file]
            start, end = self._lives.get(life, (line.start_ns, line.end_ns))
            self._lives[life] = min(start, line.start_ns), max(end, line.end_ns)

    def finish(self) -> None:
        """Note that all lines are there."""
        last = -1
        for start, end in sorted(self._lives.values()):
            # The ranks of one attempt are at work at once.
            if start >= last:
                self.starts.append(start)
            last = max(last, end)
        self._lives.clear()

    @property
    def count(self) -> int:
        return len(self.starts)

    def around(self, at_ns: int) -> tuple[int, int]:
        """Return the begin and end of the attempt that went on at a moment. The first began ever since."""
        place = bisect_right(self.starts, at_ns)
        since = self.starts[place - 1] if place > 1 else 0
        return since, self.starts[place] if 0 < place < len(self.starts) else EVER
