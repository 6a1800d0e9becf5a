"""Exceptions that have a line in the timeline: with the innermost step or stage that each has left, and some of those
that have left samples and rewards."""

from __future__ import annotations

import asyncio
from collections import Counter

from autoprof.base.exceptions import type_name
from autoprof.base.originals import time
from autoprof.run import raised
from autoprof.rundir.lines import Line, RaisedLine

# Exceptions that say nothing of a fault.
_NO_FAULT = (StopIteration, StopAsyncIteration, GeneratorExit, KeyboardInterrupt, asyncio.CancelledError)
# So many of stages have a line.
_MOST = 50
# Kinds of spans that are lost with an exception; a tool's or a turn's may be caught. So many of a name and type have a
# line, and so many in all, before what is open is written again.
_LOST = ("sample", "reward")
_MOST_ALIKE, _MOST_LOST = 2, 20


class Exceptions:
    """The exceptions of one process. Several threads may tell of theirs."""

    def __init__(self) -> None:
        # The last one that has a line, and when the span began that it left; of stages, and of samples.
        self._stage: tuple[int, int] = 0, 0
        self._lost: tuple[int, int] = 0, 0
        self._stages = self._samples = 0
        self._alike: Counter[tuple[str, str, str]] = Counter()

    def line(self, line: Line, error: BaseException) -> RaisedLine | None:
        """Return the line of an exception that leaves a span, None where there is to be none."""
        if issubclass(type(error), _NO_FAULT):
            return None
        if not (self._of_sample if line.kind in _LOST else self._of_stage)(line, error):
            return None
        said = raised.of(error)
        return RaisedLine(time.time_ns(), line.kind, line.name, line.step, line.role, line.rank, said)

    def again(self) -> None:
        """Tell of samples anew: readers look at a file's end."""
        self._alike.clear()
        self._samples = 0

    def _of_stage(self, line: Line, error: BaseException) -> bool:
        if line.kind not in ("step", "stage", "window"):
            return False
        # The spans around it began before.
        known = self._stage[0] == id(error) and line.start_ns <= self._stage[1]
        self._stage = id(error), line.start_ns
        self._stages += line.kind != "step"
        return not known and (line.kind == "step" or self._stages <= _MOST)

    def _of_sample(self, line: Line, error: BaseException) -> bool:
        known = self._lost[0] == id(error) and line.start_ns <= self._lost[1]
        self._lost = id(error), line.start_ns
        what = line.kind, line.name, type_name(error)
        if known or self._alike[what] >= _MOST_ALIKE or self._samples >= _MOST_LOST:
            return False
        self._alike[what] += 1
        self._samples += 1
        return True
