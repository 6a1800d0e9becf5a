"""Timeline of one step, from the files of all processes, as events of a trace."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec
from msgspec import Raw, Struct

from autoprof.rundir import decoder, open_spans, runs
from autoprof.rundir.jsonl import lines
from autoprof.rundir.layout import RunDir
from autoprof.rundir.records import PROCESS, Line, is_span
from autoprof.traces.clocks import Attempts, is_of
from autoprof.traces.reader import NO_JSON
from autoprof.traces.rewrite import Event, Tally, description, lay_out, microseconds

# No viewer shows more spans of a step.
MOST_SPANS = 500_000
# What the name of a span says that has begun and not ended.
OPEN = "(open)"
_STEP, _TRAINER = "step", "trainer"


class Process(Struct, frozen=True):
    """Whose spans they are: a file's process, by the file's name where its first line does not say."""

    host: str
    pid: int


def read(path: Path, too_long: Counter[str] | None = None) -> Iterator[Line]:
    """Yield the spans of one file, and a line of kind `PROCESS` where a process begins its part of it.

    Lines that can't be read, as where a process was killed, are left out; `too_long` counts those that are that.

    Raises:
        OSError: The file can't be read, or is none.
    """
    for text in lines(path):
        if text is None and too_long is not None:
            too_long[path.name] += 1
        if text is not None and not is_span(text):
            continue
        try:
            line = decoder.line(text or b"")
        except NO_JSON:
            continue
        if line.kind == PROCESS or line.start_ns <= line.end_ns:
            yield line
        elif line.end_ns:
            yield msgspec.structs.replace(line, end_ns=line.start_ns)


def process_of(path: Path) -> Process:
    """Return the process of a file."""
    host, _, pid = path.stem.rpartition("-")
    return Process(host or path.stem, int(pid) if pid.isdecimal() else 0)


def _open(run: Path) -> dict[Path, list[Line]]:
    """Return the spans that have begun and not ended by their files, as long as is known of them."""
    states = open_spans.read(run)
    until = open_spans.ends(states, runs.read(run).state.startswith("running"), time.time_ns())
    return {
        state.file: [
            Line(
                kind=span.kind,
                name=f"{span.name} {OPEN}",
                step=span.step,
                role=span.role,
                rank=span.rank,
                start_ns=span.start_ns,
                end_ns=max(span.start_ns, end),
                ids={**span.ids, "open": state.state},
                stage_kind=span.stage_kind,
            )
            for span in state.spans
        ]
        for state, end in zip(states, until, strict=True)
        if state.spans
    }


def of_step(run: Path, number: int, said: list[str] | None = None) -> dict[Process, list[Line]]:
    """Return the spans of a step: those that carry its number, and those without one that begin while it runs.

    Of a step that ran again after the run was resumed, those of the last time. The files are read twice, line by line;
    what is kept is one step's, and no more than `MOST_SPANS`; `said` is told what is left out.
    """
    paths = [path for path in RunDir(run).lines("timeline") if path.is_file()]
    attempts, too_long = Attempts(), Counter[str]()
    begun = _open(run)
    # Each host's own clock: a step that the driver timed is compared with spans of other hosts as they stand.
    bounds = []
    for place, path in enumerate(paths):
        for span in read(path, too_long):
            attempts.add(place, span)
            if span.step == number:
                bounds.append((span.kind == _STEP, span.role == _TRAINER, span.start_ns, span.end_ns))
    attempts.finish()
    for spans in begun.values():
        bounds += [
            (each.kind == _STEP, each.role == _TRAINER, each.start_ns, each.end_ns)
            for each in spans
            if each.step == number
        ]
    if said is not None:
        lines_of = {name: "1 line" if count == 1 else f"{count} lines" for name, count in too_long.items()}
        said += [f"timeline/{name}: {several} left out: too long" for name, several in lines_of.items()]
    if not bounds:
        return {}
    since, until = attempts.around(max(bounds)[2])
    steps = [bound for bound in bounds if bound[0] and since < bound[3] and bound[2] < until] or bounds
    start, end = min(bound[2] for bound in steps), max(bound[3] for bound in steps)
    found: dict[Process, list[Line]] = {}
    count = 0
    for path in paths:
        for span in read(path):
            own = span.step == number and is_of(span, since, until)
            if own or (span.step is None and span.kind != PROCESS and start <= span.start_ns <= end):
                count += 1
                if count > MOST_SPANS:
                    continue
                found.setdefault(process_of(path), []).append(span)
        for span in begun.get(path, ()):
            own = span.step == number and is_of(span, since, until)
            if (own or (span.step is None and start <= span.start_ns <= end)) and count < MOST_SPANS:
                count += 1
                found.setdefault(process_of(path), []).append(span)
    if count > MOST_SPANS and said is not None:
        said.append(
            f"left out: {count - MOST_SPANS} spans of the timeline, which has more than {MOST_SPANS} of the step"
        )
    return found


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
