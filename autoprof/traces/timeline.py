"""Timeline of one step, from the files of all processes, as events of a trace."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec
from msgspec import Raw, Struct

from autoprof.rundir import decoder, file_names, open_spans, runs
from autoprof.rundir.jsonl import lines
from autoprof.rundir.layout import RunDir
from autoprof.rundir.records import PROCESS, Line, is_span
from autoprof.traces.clocks import Attempts, is_of
from autoprof.traces.reader import NO_JSON
from autoprof.traces.rewrite import Event, Tally, description, lay_out, microseconds

# More spans of a step than any viewer shows.
MAX_SPANS = 500_000
# Suffix for the names of open spans.
OPEN = "(open)"
_STEP, _TRAINER = "step", "trainer"


class Process(Struct, frozen=True):
    """Process of a timeline file, from the file's name."""

    host: str
    pid: int


def read(path: Path, too_long: Counter[str] | None = None) -> Iterator[Line]:
    """Yield the spans of one file, and the lines of kind `PROCESS`, with which each process begins its part.

    Unreadable lines, such as the last line of a killed process, are left out.

    Args:
        path: The file.
        too_long: Counter of lines that are too long, by file name.

    Raises:
        OSError: The file can't be read, or is not a regular file.
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
    return Process(*file_names.process_of(path.name))


def _open(run: Path) -> dict[Path, list[Line]]:
    """Return the open spans by file. Each ends with the last sign of life of its process."""
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


def of_step(run: Path, number: int, messages: list[str] | None = None) -> dict[Process, list[Line]]:
    """Return the spans of a step: spans with its number, and spans without a number that begin while it runs.

    If a step ran again after the run was resumed, only its last run counts. The files are read twice, line by line. At
    most `MAX_SPANS` spans are kept.

    Args:
        run: The run's directory.
        number: The step.
        messages: A list to which messages about left-out lines and spans are added.
    """
    paths = [path for path in RunDir(run).lines("timeline") if path.is_file()]
    attempts, too_long = Attempts(), Counter[str]()
    begun = _open(run)
    # Clocks of hosts are not corrected here: spans of other hosts are compared with the driver's step as they are.
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
    if messages is not None:
        lines_of = {name: "1 line" if count == 1 else f"{count} lines" for name, count in too_long.items()}
        messages += [f"timeline/{name}: {several} left out: too long" for name, several in lines_of.items()]
    if not bounds:
        return {}
    since, until = attempts.around(max(bounds)[2])
    steps = [bound for bound in bounds if bound[0] and since < bound[3] and bound[2] < until] or bounds
    start, end = min(bound[2] for bound in steps), max(bound[3] for bound in steps)
    by_process: dict[Process, list[Line]] = {}
    count = 0
    for path in paths:
        for span in read(path):
            own = span.step == number and is_of(span, since, until)
            if own or (span.step is None and span.kind != PROCESS and start <= span.start_ns <= end):
                count += 1
                if count > MAX_SPANS:
                    continue
                by_process.setdefault(process_of(path), []).append(span)
        for span in begun.get(path, ()):
            own = span.step == number and is_of(span, since, until)
            if (own or (span.step is None and start <= span.start_ns <= end)) and count < MAX_SPANS:
                count += 1
                by_process.setdefault(process_of(path), []).append(span)
    if count > MAX_SPANS and messages is not None:
        messages.append(f"{count - MAX_SPANS} spans of the timeline left out: the step has more than {MAX_SPANS}")
    return by_process


# Display order of roles, from the driver of a step to the functions that it calls. Other roles come last.
ROLES = ("trainer", "actor", "ref", "critic", "reward", "agent_loop", "rollout")
_encode = msgspec.json.Encoder().encode


class Timeline(Struct, frozen=True):
    """Spans of a step by process.

    Attributes:
        processes: The spans of each process.
        shifts_ns: Nanoseconds to add to the times of each host.
    """

    processes: Mapping[Process, list[Line]]
    shifts_ns: Mapping[str, int] = {}

    @property
    def hosts(self) -> set[str]:
        return {process.host for process in self.processes}

    @property
    def starts_ns(self) -> int:
        """Return the start of the first span, or 0 without spans."""
        return min((span.start_ns for spans in self.processes.values() for span in spans), default=0)


class _Group(Struct, frozen=True):
    """One process in the merged trace."""

    role: str
    rank: int | None
    replica: int | None
    process: Process


def draw(timeline: Timeline, base_ns: int, of: int, write: Callable[[bytes], object]) -> Tally:
    """Write the timeline's events, separated by commas, as the first of `of` traces.

    Args:
        timeline: The timeline.
        base_ns: The base of the written times, in ns since the epoch.
        of: The number of merged traces, including the timeline.
        write: Callback for the bytes of each process.
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
    fields = {"step": span.step, "error": span.error, **span.ids, **span.counts}
    arguments = {name: value for name, value in fields.items() if value not in (None, "")}
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

    They contain the host if there are several hosts, and the pid if two names would be the same otherwise.
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
