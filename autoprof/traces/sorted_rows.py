"""Rows of events in the order of their starts, in memory that does not grow with their number.

An event is a row of 20 bytes: start, duration, and a number that stands for all else. Rows are kept in runs, each in
order. A trace consists of few blocks that are in order by themselves, so runs follow one another in few lanes, and it
is the lanes that are merged: one lane needs no merge at all.
"""

from __future__ import annotations

import heapq
import tempfile
from array import array
from collections.abc import Iterator
from typing import IO, Any

Row = tuple[float, float, int]
# 2.6 MB a run; so many stay in memory, what comes before them goes to a file.
RUN_ROWS = 128 << 10
RUNS_IN_MEMORY = 8
_BLOCK_ROWS = 8 << 10


class Rows:
    """Rows (start, minus the duration, number), added in any order, given back by start, the longer ones first."""

    def __init__(self) -> None:
        self._starts, self._lengths, self._numbers = array("d"), array("d"), array("I")
        self._in_order = True
        self._last = (float("-inf"), 0.0)
        self._runs: list[_Run] = []
        self._file: IO[bytes] | None = None

    def __enter__(self) -> Rows:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def extend(self, rows: list[Row]) -> None:
        """Add rows.

        Raises:
            OSError: There is no room for the temporary file.
        """
        if not rows:
            return
        rows.sort()
        starts, lengths, numbers = zip(*rows, strict=True)
        if rows[0][:2] < self._last:
            self._in_order = False
        self._last = max(self._last, rows[-1][:2])
        self._starts.extend(starts)
        self._lengths.extend(lengths)
        self._numbers.extend(numbers)
        if len(self._starts) >= RUN_ROWS:
            self._end_run()

    def __iter__(self) -> Iterator[Row]:
        """Yield all rows in order, once."""
        self._end_run()
        lanes: list[list[_Run]] = []
        for run in self._runs:
            lane = next((lane for lane in lanes if lane[-1].last <= run.first), None)
            if lane is None:
                lanes.append([run])
            else:
                lane.append(run)
        read = [self._read(lane) for lane in lanes]
        return read[0] if len(read) == 1 else heapq.merge(*read)

    def _end_run(self) -> None:
        if not self._starts:
            return
        columns = (self._starts, self._lengths, self._numbers)
        if not self._in_order:
            starts, lengths, numbers = zip(*sorted(zip(*columns, strict=True)), strict=True)
            columns = (array("d", starts), array("d", lengths), array("I", numbers))
        run = _Run(columns)
        self._runs.append(run)
        held = [each for each in self._runs if each.columns is not None]
        if len(held) > RUNS_IN_MEMORY:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="autoprof-")  # noqa: SIM115
            held[0].move(self._file)
        self._starts, self._lengths, self._numbers = array("d"), array("d"), array("I")
        self._in_order = True
        self._last = (float("-inf"), 0.0)

    def _read(self, lane: list[_Run]) -> Iterator[Row]:
        for run in lane:
            if run.columns is not None:
                yield from zip(*run.columns, strict=True)
                continue
            assert self._file is not None
            for first in range(0, run.count, _BLOCK_ROWS):
                yield from run.block(self._file, first, min(_BLOCK_ROWS, run.count - first))


class _Run:
    """Rows in order, in memory or in the file."""

    def __init__(self, columns: tuple[array[float], array[float], array[int]]) -> None:
        self.columns: tuple[array[float], array[float], array[int]] | None = columns
        self.count = len(columns[0])
        self.first = (columns[0][0], columns[1][0])
        self.last = (columns[0][-1], columns[1][-1])
        self._places: list[int] = []

    def move(self, file: IO[bytes]) -> None:
        """Write the rows to the end of the file, and forget them."""
        assert self.columns is not None
        file.seek(0, 2)
        for column in self.columns:
            self._places.append(file.tell())
            column.tofile(file)
        self.columns = None

    def block(self, file: IO[bytes], first: int, count: int) -> Iterator[Row]:
        """Return some rows from the file."""
        starts, lengths, numbers = array("d"), array("d"), array("I")
        columns: tuple[array[Any], ...] = (starts, lengths, numbers)
        for place, column in zip(self._places, columns, strict=True):
            file.seek(place + first * column.itemsize)
            column.fromfile(file, count)
        return zip(starts, lengths, numbers, strict=True)
