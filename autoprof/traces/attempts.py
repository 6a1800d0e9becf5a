"""When a run was begun again: killed and resumed, it repeats steps since its last checkpoint, and their numbers."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from typing import Protocol

# The kind of the line with which a process begins its part of a file.
PROCESS = "process"
EVER = 1 << 63
_DRIVES = ("step", "timer", "stage")


class Line(Protocol):
    """What counts of a timeline's line here."""

    @property
    def kind(self) -> str: ...

    @property
    def role(self) -> str: ...

    @property
    def start_ns(self) -> int: ...

    @property
    def end_ns(self) -> int: ...


def is_of(line: Line, since_ns: int, until_ns: int) -> bool:
    """Whether a line is of the attempt that lies between two moments."""
    return line.end_ns > since_ns and line.start_ns < until_ns


class Attempts:
    """The times from which on a run's trainers were at work, each until all of them had ended."""

    def __init__(self) -> None:
        # By file and how many processes have begun it, since pids come again: first start and last end.
        self._lives: dict[tuple[int, int], tuple[int, int]] = {}
        self._begun: Counter[int] = Counter()
        self._starts: list[int] = []

    def add(self, file: int, line: Line) -> None:
        """Take a line; those of a file come in their order."""
        if line.kind == PROCESS:
            self._begun[file] += 1
        elif line.role == "trainer" and line.kind in _DRIVES:
            life = file, self._begun[file]
            start, end = self._lives.get(life, (line.start_ns, line.end_ns))
            self._lives[life] = min(start, line.start_ns), max(end, line.end_ns)

    def finish(self) -> None:
        """All lines are there."""
        last = -1
        for start, end in sorted(self._lives.values()):
            # The ranks of one attempt are at work at once.
            if start >= last:
                self._starts.append(start)
            last = max(last, end)
        self._lives.clear()

    @property
    def count(self) -> int:
        return len(self._starts)

    def around(self, at_ns: int) -> tuple[int, int]:
        """From when on and until when the attempt was that went on at a moment. The first is since ever."""
        place = bisect_right(self._starts, at_ns)
        since = self._starts[place - 1] if place > 1 else 0
        return since, self._starts[place] if 0 < place < len(self._starts) else EVER
