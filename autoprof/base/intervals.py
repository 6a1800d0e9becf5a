"""Arithmetic of intervals, which are pairs of ns: unions, gaps, and the owner of each moment if several overlap."""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

Interval = tuple[int, int]


class Union:
    """Union of intervals that are added one by one, kept as ordered, disjoint pieces.

    It needs memory for the pieces only: thousands of ranks that do the same at about the same time are one piece.
    """

    def __init__(self, intervals: Iterable[Interval] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in intervals:
            self.add(start, end)

    def add(self, start: int, end: int) -> None:
        """Add an interval. An interval that is empty or ends before its start changes nothing."""
        starts, ends = self._starts, self._ends
        if end <= start:
            return
        if ends and starts[-1] <= start <= ends[-1]:
            # The usual case: it overlaps the last piece.
            if end > ends[-1]:
                ends[-1] = end
            return
        # Merge the pieces that it touches with it.
        first = bisect_left(ends, start)
        stop = bisect_right(starts, end)
        if first < stop:
            start = min(start, starts[first])
            end = max(end, ends[stop - 1])
        starts[first:stop] = [start]
        ends[first:stop] = [end]

    def pieces(self) -> list[Interval]:
        return list(zip(self._starts, self._ends, strict=True))

    def within(self, start: int, end: int) -> list[Interval]:
        """Return the pieces between two moments, cut there."""
        first = bisect_right(self._ends, start)
        stop = bisect_left(self._starts, end)
        return [
            (max(start, self._starts[i]), min(end, self._ends[i]))
            for i in range(first, stop)
            if max(start, self._starts[i]) < min(end, self._ends[i])
        ]

    def without(self, start: int, end: int) -> list[Interval]:
        """Return the gaps between two moments that no piece covers."""
        gaps = []
        at = start
        for low, high in self.within(start, end):
            if at < low:
                gaps.append((at, low))
            at = high
        if at < end:
            gaps.append((at, end))
        return gaps

    def length(self, start: int | None = None, end: int | None = None) -> int:
        """Return the covered time in ns, of all pieces or between two moments."""
        if start is None or end is None:
            return sum(self._ends) - sum(self._starts)
        return sum(high - low for low, high in self.within(start, end))


def segments(spans: Sequence[tuple[str, int, int]], start: int, end: int) -> list[tuple[str, int, int]]:
    """Return the owners of the time between two moments, in order. Each moment has one owner at most.

    If spans overlap, the latest to start owns the moment, so nested time belongs to the inner span. If several start
    together, the first to end owns it.

    Args:
        spans: Names, starts and ends in ns.
        start: The first moment, in ns.
        end: The last moment, in ns.
    """
    clipped = sorted(
        (
            (max(low, start), low, -high, name, min(high, end))
            for name, low, high in spans
            if low < end and high > start
        ),
        key=lambda span: span[0],
    )
    owned: list[tuple[str, int, int]] = []
    running: list[tuple[int, int, str, int]] = []
    at, position = start, 0
    while position < len(clipped) or running:
        while running and running[0][3] <= at:
            heapq.heappop(running)
        if not running:
            if position == len(clipped):
                break
            at = max(at, clipped[position][0])
        while position < len(clipped) and clipped[position][0] <= at:
            _, low, minus_high, name, high = clipped[position]
            if high > at:
                heapq.heappush(running, (-low, -minus_high, name, high))
            position += 1
        if not running:
            continue
        owner = running[0]
        until = owner[3] if position == len(clipped) else min(owner[3], clipped[position][0])
        if until > at:
            if owned and owned[-1][0] == owner[2] and owned[-1][2] == at:
                owned[-1] = (owner[2], owned[-1][1], until)
            else:
                owned.append((owner[2], at, until))
        at = until
    return owned


def exclusive(spans: Sequence[tuple[str, int, int]], start: int, end: int) -> dict[str, int]:
    """Return the ns that each name owns between two moments, by the rule of `segments`."""
    durations: dict[str, int] = {}
    for name, low, high in segments(spans, start, end):
        durations[name] = durations.get(name, 0) + high - low
    return durations
