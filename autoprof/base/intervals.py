"""Arithmetic of intervals, as pairs of ns: unions, gaps, and the owner of each moment where several overlap."""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

Interval = tuple[int, int]


class Union:
    """A union of intervals that grows one by one, as disjoint pieces in order.

    Its memory is that of the pieces: thousands of ranks that do the same at about the same time are one piece.
    """

    def __init__(self, intervals: Iterable[Interval] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in intervals:
            self.add(start, end)

    def add(self, start: int, end: int) -> None:
        """Add an interval. An empty one, or one that runs backwards, changes nothing."""
        if end <= start:
            return
        # Those that it touches become one with it.
        first = bisect_left(self._ends, start)
        behind = bisect_right(self._starts, end)
        if first < behind:
            start = min(start, self._starts[first])
            end = max(end, self._ends[behind - 1])
        self._starts[first:behind] = [start]
        self._ends[first:behind] = [end]

    def pieces(self) -> list[Interval]:
        return list(zip(self._starts, self._ends, strict=True))

    def within(self, start: int, end: int) -> list[Interval]:
        """Return the pieces between two moments, cut there."""
        first = bisect_right(self._ends, start)
        behind = bisect_left(self._starts, end)
        return [
            (max(start, self._starts[place]), min(end, self._ends[place]))
            for place in range(first, behind)
            if max(start, self._starts[place]) < min(end, self._ends[place])
        ]

    def without(self, start: int, end: int) -> list[Interval]:
        """Return the gaps that no piece covers between two moments."""
        found = []
        at = start
        for low, high in self.within(start, end):
            if at < low:
                found.append((at, low))
            at = high
        if at < end:
            found.append((at, end))
        return found

    def length(self, start: int | None = None, end: int | None = None) -> int:
        """Return the covered time, in all or between two moments."""
        if start is None or end is None:
            return sum(self._ends) - sum(self._starts)
        return sum(high - low for low, high in self.within(start, end))


def segments(spans: Sequence[tuple[str, int, int]], start: int, end: int) -> list[tuple[str, int, int]]:
    """Return the owners of the time between two moments, in order; each moment has one owner at most.

    Where several spans go on, that which began last has the moment (the innermost one, where they nest); of those that
    began together the one that ends first.

    Args:
        spans: Names, starts and ends.
        start: From when on.
        end: Until when.
    """
    clipped = sorted(
        (
            (max(low, start), low, -high, name, min(high, end))
            for name, low, high in spans
            if low < end and high > start
        ),
        key=lambda span: span[0],
    )
    found: list[tuple[str, int, int]] = []
    going: list[tuple[int, int, str, int]] = []
    at, place = start, 0
    while place < len(clipped) or going:
        while going and going[0][3] <= at:
            heapq.heappop(going)
        if not going:
            if place == len(clipped):
                break
            at = max(at, clipped[place][0])
        while place < len(clipped) and clipped[place][0] <= at:
            _, low, minus_high, name, high = clipped[place]
            if high > at:
                heapq.heappush(going, (-low, -minus_high, name, high))
            place += 1
        if not going:
            continue
        owner = going[0]
        until = owner[3] if place == len(clipped) else min(owner[3], clipped[place][0])
        if until > at:
            if found and found[-1][0] == owner[2] and found[-1][2] == at:
                found[-1] = (owner[2], found[-1][1], until)
            else:
                found.append((owner[2], at, until))
        at = until
    return found


def exclusive(spans: Sequence[tuple[str, int, int]], start: int, end: int) -> dict[str, int]:
    """Return how long each name owns the time between two moments, by the rule of `segments`."""
    found: dict[str, int] = {}
    for name, low, high in segments(spans, start, end):
        found[name] = found.get(name, 0) + high - low
    return found
