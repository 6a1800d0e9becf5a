"""Timeline of a step as events of a trace: a process for each role of each process of the run."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping

import msgspec
from msgspec import Raw, Struct

from autoprof.rundir.lines import Line
from autoprof.traces.rewrite import Event, Tally, description, microseconds
from autoprof.traces.timeline_spans import Process
from autoprof.traces.tracks import lay_out

# From what drives a step down to what it calls; a role that is not here comes last.
ROLES = ("trainer", "actor", "ref", "critic", "reward", "agent_loop", "rollout")
_encode = msgspec.json.Encoder().encode


class Timeline(Struct, frozen=True):
    """Spans of a step by their processes, and what to add to the times of each host."""

    processes: Mapping[Process, list[Line]]
    shifts_ns: Mapping[str, int] = {}

    @property
    def hosts(self) -> set[str]:
        return {process.host for process in self.processes}

    @property
    def starts_ns(self) -> int:
        """Return when the first span begins, 0 where there is none."""
        return min((span.start_ns for spans in self.processes.values() for span in spans), default=0)


class _Group(Struct, frozen=True):
    """One process in the merged trace."""

    role: str
    rank: int | None
    replica: int | None
    process: Process


def draw(timeline: Timeline, base_ns: int, of: int, write: Callable[[bytes], object]) -> Tally:
    """Write the timeline's events, divided by commas, as those of the first of `of` traces.

    Args:
        timeline: The timeline.
        base_ns: What times count from, in ns since the epoch.
        of: How many traces are merged, the timeline among them.
        write: Takes the bytes, a process at a time.
    """
    tally = Tally()
    groups: dict[_Group, list[Line]] = {}
    for process, spans in timeline.processes.items():
        for span in spans:
            group = _Group(span.role, span.rank, _replica(span), process)
            groups.setdefault(group, []).append(span)
    names = _names(list(groups))
    pids = itertools.count(1, of)
    for place, group in enumerate(sorted(groups, key=_order)):
        pid = next(pids)
        shift = timeline.shifts_ns.get(group.process.host, 0) - base_ns
        detail = f"on {group.process.host}, pid {group.process.pid}"
        events = description(pid, names[group], detail, min(place, 999))
        for tid, lane in enumerate(lay_out(groups[group]), 1):
            number = Raw(b"%d" % tid)
            for what, arguments in (("thread_name", {"name": lane.name}), ("thread_sort_index", {"sort_index": tid})):
                args = Raw(_encode(arguments))
                events.append(Event(ph="M", name=Raw(_encode(what)), pid=pid, tid=number, args=args))
            events += [_event(span, pid, number, shift) for span in lane.spans]
        text = (b",\n" if tally.events else b"") + _encode(events)[1:-1]
        tally.events += len(events)
        tally.bytes += len(text)
        write(text)
    return tally


def _event(span: Line, pid: int, tid: Raw, shift: int) -> Event:
    said = {"step": span.step, "error": span.error, **span.ids, **span.counts}
    arguments = {name: value for name, value in said.items() if value not in (None, "")}
    return Event(
        ph="X",
        cat=Raw(_encode(span.kind)),
        name=Raw(_encode(span.name)),
        pid=pid,
        tid=tid,
        ts=microseconds(span.start_ns + shift),
        dur=microseconds(span.end_ns - span.start_ns),
        args=Raw(_encode(arguments)),
    )


def _replica(span: Line) -> int | None:
    replica = span.ids.get("replica")
    return replica if isinstance(replica, int) else None


def _names(groups: list[_Group]) -> dict[_Group, str]:
    """Return names such as `actor (timeline) rank0`.

    They have the host where there are several, and the pid where they would be the same otherwise.
    """
    several = len({group.process.host for group in groups}) > 1

    def name(group: _Group, with_pid: bool) -> str:
        rank = "" if group.rank is None else f"rank{group.rank}"
        replica = "" if group.replica is None else f"replica{group.replica}"
        host = group.process.host if several else ""
        pid = f"pid {group.process.pid}" if with_pid else ""
        return " ".join(filter(None, [group.role or "other", "(timeline)", rank, replica, host, pid]))

    like = Counter(name(group, False) for group in groups)
    return {group: name(group, like[name(group, False)] > 1) for group in groups}


def _order(group: _Group) -> tuple[int, str, int, int, str, int]:
    place = ROLES.index(group.role) if group.role in ROLES else len(ROLES)
    replica = -1 if group.replica is None else group.replica
    return place, group.role, replica, group.rank or 0, group.process.host, group.process.pid
