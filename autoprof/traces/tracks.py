"""Layout of a process's spans in tracks: what nests in one, what overlaps beside each other.

Viewers draw a track's slices inside of each other, and break what overlaps there. Samples run at once, so each has a
track while it runs, and its turns, tools and rewards lie in it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

import msgspec
from msgspec import Struct

from autoprof.rundir.lines import Line

_OF_SAMPLES = frozenset(("sample", "turn", "tool", "reward"))
_ALONE = frozenset(("request",))


class Lane(Struct, eq=False):
    """One track: what it is called, its spans by their starts, and while it is laid out the ends of what is open in it,
    each inside of the one before."""

    name: str
    spans: list[Line]
    open: list[int] = msgspec.field(default_factory=list)
    group: tuple[str, ...] = ()


def lay_out(spans: Iterable[Line]) -> list[Lane]:
    """Return the tracks of one process: first the stages and timers, then samples, then requests."""
    kinds = {"": _Kind(""), "samples": _Kind("samples"), "requests": _Kind("requests")}
    for number, span in enumerate(sorted(spans, key=lambda each: (each.start_ns, -each.end_ns))):
        kind, group = _group(span, number)
        lane = kinds[kind].lane_for(span, group)
        lane.open.append(span.end_ns)
        lane.spans.append(span)
    return [lane for kind in kinds.values() for lane in kind.lanes]


class _Kind:
    """The tracks of spans of one kind. There may be thousands at once, so none is looked for."""

    def __init__(self, name: str) -> None:
        self.lanes: list[Lane] = []
        self._name = name
        # Those with nothing open, the first before the others; and the others by when their outermost span ends.
        self._free: list[int] = []
        self._busy: list[tuple[int, int]] = []
        self._of_group: dict[tuple[str, ...], list[Lane]] = {}

    def lane_for(self, span: Line, group: tuple[str, ...]) -> Lane:
        """Return the track of the same group in which the span nests, else the first that is free, else a new one."""
        while self._busy and self._busy[0][0] <= span.start_ns:
            self._release(heapq.heappop(self._busy)[1])
        for lane in self._of_group.get(group, ()):
            while lane.open[-1] <= span.start_ns:
                lane.open.pop()
            if span.end_ns <= lane.open[-1]:
                return lane
        number = heapq.heappop(self._free) if self._free else self._add()
        lane = self.lanes[number]
        lane.group = group
        self._of_group.setdefault(group, []).append(lane)
        heapq.heappush(self._busy, (span.end_ns, number))
        return lane

    def _add(self) -> int:
        count = len(self.lanes) + 1
        self.lanes.append(Lane(f"{self._name or 'stages'} {count}" if self._name or self.lanes else "stages", []))
        return count - 1

    def _release(self, number: int) -> None:
        lane = self.lanes[number]
        lane.open.clear()
        same = self._of_group[lane.group]
        same.remove(lane)
        if not same:
            del self._of_group[lane.group]
        heapq.heappush(self._free, number)


def _group(span: Line, number: int) -> tuple[str, tuple[str, ...]]:
    """Return which tracks a span belongs to, and what it may lie inside of there."""
    if span.kind in _OF_SAMPLES:
        names = ("sample", "rollout", "validate")
        return "samples", tuple(str(span.ids.get(name, "")) for name in names)
    return ("requests", (str(number),)) if span.kind in _ALONE else ("", ())
