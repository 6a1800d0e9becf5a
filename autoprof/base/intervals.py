"""Arithmetic of intervals: unions, gaps, and the owner of each moment if several intervals overlap.

An interval is a start and an end in ns.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from operator import itemgetter

Interval = tuple[int, int]


class Union:
    """Union of intervals that are added one by one, kept as ordered, disjoint pieces.

    Only the pieces need memory. If thousands of ranks are busy at about the same time, their intervals are one piece.
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
            # The usual case: the new interval overlaps the last piece.
            if end > ends[-1]:
                ends[-1] = end
            return
        # Merge the new interval with all pieces that it touches.
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
        """Return the pieces between `start` and `end`. Pieces that extend beyond these moments are cut there."""
        first = bisect_right(self._ends, start)
        stop = bisect_left(self._starts, end)
        return [
            (max(start, self._starts[i]), min(end, self._ends[i]))
            for i in range(first, stop)
            if max(start, self._starts[i]) < min(end, self._ends[i])
        ]

    def without(self, start: int, end: int) -> list[Interval]:
        """Return the parts of the time from `start` to `end` that no piece covers."""
        gaps = []
        gap_start = start
        for low, high in self.within(start, end):
            if gap_start < low:
                gaps.append((gap_start, low))
            gap_start = high
        if gap_start < end:
            gaps.append((gap_start, end))
        return gaps

    def length(self, start: int | None = None, end: int | None = None) -> int:
        """Return the length in ns of all pieces together, or of their parts between `start` and `end`."""
        if start is None or end is None:
            return sum(self._ends) - sum(self._starts)
        return sum(high - low for low, high in self.within(start, end))


def segments(spans: Sequence[tuple[str, int, int]], start: int, end: int) -> list[tuple[str, int, int]]:
    """Divide the time between two moments into segments that have one owner each.

    If spans overlap, the span that started last owns the moment, so nested time belongs to the inner span. If several
    spans started together, the span that ends first owns the moment. Moments without a span are in no segment.

    Args:
        spans: Names, starts and ends in ns.
        start: The first moment, in ns.
        end: The last moment, in ns.

    Returns:
        The name of the owner, the start and the end of each segment, in order of time.
    """
    owned: list[tuple[str, int, int]] = []
    covered = Union()
    # Spans in the order of their claims. A span gets the time that no earlier span owns.
    for name, low, high in sorted(spans, key=lambda span: (-span[1], span[2], span[0])):
        low, high = max(low, start), min(high, end)
        owned.extend((name, *gap) for gap in covered.without(low, high))
        covered.add(low, high)
    owned.sort(key=itemgetter(1))
    joined: list[tuple[str, int, int]] = []
    for name, low, high in owned:
        if joined and joined[-1][0] == name and joined[-1][2] == low:
            joined[-1] = (name, joined[-1][1], high)
        else:
            joined.append((name, low, high))
    return joined


def exclusive(spans: Sequence[tuple[str, int, int]], start: int, end: int) -> dict[str, int]:
    """Return a dict from name to the ns that the name owns between two moments, by the rule of `segments`."""
    durations: dict[str, int] = {}
    for name, low, high in segments(spans, start, end):
        durations[name] = durations.get(name, 0) + high - low
    return durations
