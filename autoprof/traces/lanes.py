"""Lays a process's spans out in tracks: what nests in one, what overlaps beside each other.

Viewers draw a track's slices inside of each other, and break what overlaps there. Samples run at once, so each has a
track while it runs, and its turns, tools and rewards lie in it.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from msgspec import Struct

from autoprof.traces.spans import Span

_OF_SAMPLES = frozenset(("sample", "turn", "tool", "reward"))
_ALONE = frozenset(("request",))


class Lane(Struct):
    """One track: what it is called, its spans by their starts, and while it is laid out what is open in it."""

    name: str
    spans: list[Span]
    open: list[int] = msgspec.field(default_factory=list)
    group: tuple[str, ...] = ()


def lay_out(spans: Iterable[Span]) -> list[Lane]:
    """The tracks of one process: first the stages and timers, then samples, then requests."""
    lanes: dict[str, list[Lane]] = {"": [], "samples": [], "requests": []}
    for number, span in enumerate(sorted(spans, key=lambda each: (each.start_ns, -each.end_ns))):
        kind, group = _group(span, number)
        for lane in _preferred(lanes[kind], group):
            while lane.open and lane.open[-1] <= span.start_ns:
                lane.open.pop()
            if not lane.open or (lane.group == group and span.end_ns <= lane.open[-1]):
                break
        else:
            name = f"{kind or 'stages'} {len(lanes[kind]) + 1}" if kind or lanes[kind] else "stages"
            lane = Lane(name, [])
            lanes[kind].append(lane)
        lane.group = group
        lane.open.append(span.end_ns)
        lane.spans.append(span)
    return [lane for found in lanes.values() for lane in found]


def _group(span: Span, number: int) -> tuple[str, tuple[str, ...]]:
    """Which tracks a span belongs to, and what it may lie inside of there."""
    if span.kind in _OF_SAMPLES:
        names = ("sample", "rollout", "validate")
        return "samples", tuple(str(span.ids.get(name, "")) for name in names)
    return ("requests", (str(number),)) if span.kind in _ALONE else ("", ())


def _preferred(lanes: list[Lane], group: tuple[str, ...]) -> list[Lane]:
    """A sample's own track first, where it is still open."""
    return sorted(lanes, key=lambda lane: not (lane.open and lane.group == group)) if group else lanes
