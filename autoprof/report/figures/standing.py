"""What stands in a step that takes too long, in words: one function for each kind of evidence, the surest first."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

import msgspec

from autoprof.base.units import seconds
from autoprof.report.figures import hangs, places
from autoprof.report.figures.collectives import BY_TORCH, Record, Stuck
from autoprof.report.figures.hangs import Process
from autoprof.report.figures.open_now import where
from autoprof.report.figures.words import listed, several
from autoprof.rundir import open_spans
from autoprof.rundir.layout import RunDir
from autoprof.rundir.stacks import OpenSpan

# A span of a sample waits that is older than this and so many times as old as the median of so many of its like.
OLD_S, TIMES, FEWEST = 60.0, 5, 3
_OF_SAMPLES = ("sample", "turn", "tool", "reward", "request")
_MOST_FILES = 8


class Said(msgspec.Struct, frozen=True):
    """A statement, the lines behind it, and the file."""

    text: str
    evidence: list[str] = []
    file: str = ""


class Spans(msgspec.Struct, frozen=True):
    """The open spans of one process, and up to when that is known."""

    host: str
    pid: int
    spans: Sequence[OpenSpan]
    end_ns: int
    process: Process | None = None


def by_itself(processes: Sequence[Process]) -> Iterator[Said]:
    """Tell of processes that wait for themselves: two threads for one another's locks, an actor for its own work."""
    for process in processes:
        if process.deadlock:
            yield Said(f"{process.name}: {process.deadlock}", _stack(process), process.file)
        elif process.itself:
            text = (
                f"{process.name} waits for itself: ray.get in {process.itself} asks for what the actor itself is to do"
            )
            yield Said(text, _stack(process), process.file)


def records(processes: Sequence[Process]) -> list[Record]:
    """Return the flight records; of processes that have the same title and rank none: whose is whose
    is not known."""
    ranks = Counter((process.world, process.rank) for process in processes if process.flight_record)
    return [
        Record(process.flight_record, process.rank, process.world)
        for process in processes
        if process.flight_record and process.rank is not None and ranks[process.world, process.rank] == 1
    ]


def collective(stuck: Stuck, processes: Sequence[Process]) -> Said:
    """Tell which ranks did not join a collective, or called another one."""
    of = {process.rank: process for process in processes if process.world == stuck.world}
    role = hangs.roles(processes).get(next(iter(of.values())).label, "") if of else ""
    stages = Counter(
        process.stage.name
        for rank in stuck.waiting
        if (process := of.get(rank)) is not None and process.stage is not None
    )
    stage = f" in {stages.most_common(1)[0][0]}" if stages else ""
    call = f"{stuck.name} #{stuck.number}"
    group = (
        f"process group {stuck.group}; {'torch' if stuck.by == BY_TORCH else 'autoprof'} compared the flight records"
    )
    evidence = [f"{_ranks(stuck.waiting, '')} {_plural(stuck.waiting, 'waits', 'wait')} in it", group]
    if caller := places.told(stuck.frames):
        evidence[0] += f", called in {places.text(caller)}"
    if stuck.unknown:
        evidence.append(f"of {_ranks(stuck.unknown, role)} there is no record")
    if stuck.late:
        found = [process for rank in stuck.late if (process := of.get(rank)) is not None]
        at = list(dict.fromkeys(process.place for process in found if process.place))
        here = f"; {_plural(stuck.late, 'it is', 'they are')} in {at[0]}" if len(at) == 1 else ""
        text = f"{_ranks(stuck.late, role)} {_plural(stuck.late, 'has', 'have')} not joined {call}{stage}{here}"
        evidence += [line for process in found[:1] for line in _stack(process)]
        return Said(text, evidence, found[0].file if found else "")
    others = list(stuck.other.items())
    rank, what = others[0]
    alike = [each for each, other in others if other == what]
    called = f"{_ranks(alike, role)} called {what} as #{stuck.number}{stage}, {_rest(stuck, alike)} {stuck.called}"
    more = [f"rank {each} called {other}" for each, other in others if other != what]
    return Said(called, [*more[:5], *evidence], of[rank].file if rank in of else "")


def _rest(stuck: Stuck, alike: Sequence[int]) -> str:
    rest = [rank for rank in stuck.waiting if rank not in alike]
    return f"rank {rest[0]}" if len(rest) == 1 else "the others"


def engines(processes: Sequence[Process], age_s: float) -> Iterator[Said]:
    """Tell of engines in which requests wait for nothing that goes on."""
    for process in processes:
        running, waiting, free, longest = (
            value if isinstance(value := process.engine.get(name), (int, float)) else None
            for name in ("running", "waiting", "free_blocks", "longest_s")
        )
        who = f"replica {process.replica}" if process.replica is not None else process.name
        here = f"; it is in {process.place}" if process.place and not process.waits else ""
        state = [f"{name} {value}" for name, value in sorted(process.engine.items())]
        requests = several(int(waiting or 0), "request")
        if waiting and free == 0:
            yield Said(f"{who} has {requests} waiting and no free block", state, process.file)
        elif waiting and not running:
            yield Said(f"{who} has {requests} waiting and none running{here}", state, process.file)
        elif (running or waiting) and longest is not None and longest >= max(OLD_S, age_s / 2):
            text = f"{who} has {several(int(running or 0), 'request')} running and {int(waiting or 0)} waiting"
            yield Said(f"{text}, the longest since {seconds(longest)}{here}", state, process.file)


def samples(run: str, found: Sequence[Spans], sure: bool) -> Iterator[Said]:
    """Tell of samples, turns, tools and rewards that wait far longer than their like, the oldest first.

    Args:
        run: The run's directory.
        found: The open spans of its processes.
        sure: Whether the step is known to stand, so that spans without any like are told.
    """
    inner: dict[tuple[str, int, str], tuple[OpenSpan, Spans]] = {}
    for of in found:
        for place, span in enumerate(of.spans):
            if span.kind in _OF_SAMPLES:
                ids = {name: span.ids.get(name) for name in ("sample", "rollout", "validate")}
                key = of.host, of.pid, str(ids if ids["sample"] is not None else place)
                if key not in inner or inner[key][0].start_ns <= span.start_ns:
                    inner[key] = span, of
    groups: dict[tuple[str, str], list[tuple[float, OpenSpan, Spans]]] = defaultdict(list)
    for span, of in inner.values():
        if (age := (of.end_ns - span.start_ns) / 1e9) >= OLD_S:
            groups[span.kind, span.name].append((age, span, of))
    for (kind, name), old in sorted(groups.items(), key=lambda each: -max(age for age, _, _ in each[1])):
        old.sort(key=lambda each: -each[0])
        took = _took(run, [of for _, _, of in old], kind, name)
        usual = median(took) if len(took) >= FEWEST else None
        late = [each for each in old if usual is None or each[0] >= TIMES * usual]
        if late and (usual is not None or sure):
            yield _sample(kind, name, late, usual)


def _sample(kind: str, name: str, late: Sequence[tuple[float, OpenSpan, Spans]], usual: float | None) -> Said:
    age, span, of = late[0]
    inside = f"in {kind} {name}" if kind != "sample" else "with no turn or tool open"
    work = next((each for each in of.process.working if span in each.spans), None) if of.process is not None else None
    here = f"; it is in {work.place}" if work is not None else ""
    who = where(msgspec.structs.replace(span, role="")) or name
    text = f"{who} waits {seconds(age)} {inside}{here}"
    if len(late) > 1:
        thing = "request" if kind == "request" else "sample"
        text = f"{several(len(late), thing)} wait up to {seconds(age)} {inside}{here}"
    evidence = [f"{where(each)}: {seconds(since)}, {who.host} {who.pid}" for since, each, who in late[:4]]
    evidence += [f"usually {seconds(usual)}"] if usual is not None else []
    return Said(text, evidence, f"timeline/{of.host}-{of.pid}.jsonl")


def _took(run: str, found: Sequence[Spans], kind: str, name: str) -> list[float]:
    """Return how long spans with this name took that ended last, in the files of these processes."""
    stems = list(dict.fromkeys(f"{of.host}-{of.pid}" for of in found))[:_MOST_FILES]
    there = {path.stem: path for path in RunDir(Path(run)).lines("timeline")}
    return [
        (line.end_ns - line.start_ns) / 1e9
        for stem in stems
        if stem in there
        for line in open_spans.ended(there[stem])
        if line.kind == kind and line.name == name
    ]


def stages(found: Sequence[Spans], labels: Mapping[tuple[str, int], str]) -> Iterator[Said]:
    """Tell of ranks that are in an earlier stage than the others of their role, or in none."""
    groups: dict[str, list[tuple[Spans, OpenSpan]]] = defaultdict(list)
    for of in found:
        own = [span for span in of.spans if span.kind == "stage" and span.rank is not None]
        if own:
            groups[labels.get((of.host, of.pid)) or own[-1].role].append((of, own[-1]))
    for members in groups.values():
        first: dict[tuple[int | None, str], int] = {}
        for _, span in members:
            key = span.step, span.name
            first[key] = min(first.get(key, span.start_ns), span.start_ns)
        if len(first) < 2:
            continue
        behind = min(first, key=lambda key: (key[0] if key[0] is not None else 0, first[key]))
        late = [(of, span) for of, span in members if (span.step, span.name) == behind]
        others = [span for _, span in members if (span.step, span.name) != behind]
        if len(late) > len(others):
            continue
        of, span = late[0]
        age = max((each.end_ns - other.start_ns) / 1e9 for each, other in late)
        ranks = [other.rank for _, other in late if other.rank is not None]
        at = {each.process.place for each, _ in late if each.process is not None and each.process.place}
        here = f"; {_plural(ranks, 'it is', 'they are')} in {at.pop()}" if len(at) == 1 else ""
        most = Counter(other.name for other in others).most_common(1)[0][0]
        text = f"{_ranks(ranks, span.role)} {_plural(ranks, 'is', 'are')} in {span.name} since {seconds(age)}"
        yield Said(f"{text}, {several(len(others), 'other')} in {most}{here}", [], f"timeline/{of.host}-{of.pid}.jsonl")


def stacks(processes: Sequence[Process]) -> Iterator[Said]:
    """Tell of processes whose stacks differ from their like: one that is not in the collective in which the others are,
    one that is elsewhere than most."""
    by_label: dict[str, list[Process]] = defaultdict(list)
    for process in processes:
        if process.stack:
            by_label[process.label].append(process)
    for alike in by_label.values():
        waiting = [process for process in alike if process.waits == places.COLLECTIVE]
        others = [process for process in alike if process.waits not in (places.COLLECTIVE, places.IDLE)]
        what = places.COLLECTIVE
        if not waiting:
            place, count = Counter(process.place for process in others).most_common(1)[0] if others else ("", 0)
            if count < 2:
                continue
            waiting, what = [each for each in others if each.place == place], f"in {place}"
            others = [process for process in others if process.place != place]
        if not others or len(others) > len(waiting):
            continue
        late = others[0]
        names = late.name if len(others) == 1 else f"{late.name} and {several(len(others) - 1, 'other')}"
        text = f"{names} {_plural(others, 'is', 'are')} in {late.place}, {several(len(waiting), 'other')} {what}"
        yield Said(text, _stack(late), late.file)


def busy(processes: Sequence[Process]) -> Iterator[Said]:
    """Tell where the processes are that wait for no other one: those with an open stage or step."""
    found = [
        (process, work)
        for process in processes
        for work in process.working[:1]
        if process.spans and (process.waits not in (places.COLLECTIVE, places.RAY) or not work.main)
    ]
    found.sort(key=lambda each: (each[0].stage is None, not each[1].main, each[0].waits == places.IDLE))
    for process, work in found[:3]:
        stage = f" in {process.stage.name}" if process.stage is not None else ""
        yield Said(f"{process.name} is in {work.place}{stage}", _stack(process), process.file)


def _stack(process: Process) -> list[str]:
    inner = [places.text(frame) for frame in process.stack[-4:]]
    return [f"{process.name}, main thread: {' > '.join(inner)}"] if inner else []


def _ranks(ranks: Sequence[int], role: str) -> str:
    numbers = listed(map(str, ranks), 8)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {numbers}{f' of {role}' if role else ''}"


def _plural(ranks: Sequence[object], one: str, many: str) -> str:
    return one if len(ranks) == 1 else many
