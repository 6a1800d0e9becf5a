"""Sentences about a step that takes too long: one function for each kind of evidence, the most certain first.

They also report runs that begin no further step, samples that wait longer than others, and ranks in an earlier stage.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import median

import msgspec

from autoprof.base.redact import writable
from autoprof.base.units import seconds
from autoprof.report.figures.words import listed, several
from autoprof.report.findings.registry import KINDS
from autoprof.report.hangs import collectives, places, read
from autoprof.report.hangs.collectives import BY_TORCH, Record, Stuck
from autoprof.report.hangs.read import Hang, OpenSpans, Process, where
from autoprof.report.model import Finding
from autoprof.rundir import layout, open_spans, tails
from autoprof.rundir.layout import RunDir
from autoprof.rundir.open_spans import ProcessState
from autoprof.rundir.records import OpenSpan

# A sample waits that is older than `standing.OLD_S` and so many times as old as the median of so many of its like.
WAITING_TIMES, FEWEST_ALIKE = 5, 3
_MOST_FILES = 8


class Spans(msgspec.Struct, frozen=True):
    """The open spans of one process, and up to when that is known."""

    host: str
    pid: int
    spans: Sequence[OpenSpan]
    end_ns: int
    process: Process | None = None


def waiting_samples(run: str, found: Sequence[Spans], stands_s: float | None) -> Iterator[Said]:
    """Tell of samples, turns, tools and rewards that wait far longer than their like, the oldest first.

    Args:
        run: The run's directory.
        found: The open spans of its processes.
        stands_s: The age of a step that is known to stand, for which spans without any like are told, too.
    """
    least = OLD_S if stands_s is None else min(OLD_S, stands_s / 2)
    inner: dict[tuple[str, int, str], tuple[OpenSpan, Spans]] = {}
    for of in found:
        for place, span in enumerate(of.spans):
            if span.kind in OF_SAMPLES:
                ids = {name: span.ids.get(name) for name in ("sample", "rollout", "validate")}
                key = of.host, of.pid, str(ids if ids["sample"] is not None else place)
                if key not in inner or inner[key][0].start_ns <= span.start_ns:
                    inner[key] = span, of
    groups: dict[tuple[str, str], list[tuple[float, OpenSpan, Spans]]] = defaultdict(list)
    for span, of in inner.values():
        if (age := (of.end_ns - span.start_ns) / 1e9) >= least:
            groups[span.kind, span.name].append((age, span, of))
    for (kind, name), old in sorted(groups.items(), key=lambda each: -max(age for age, _, _ in each[1])):
        old.sort(key=lambda each: -each[0])
        took = _took(run, [of for _, _, of in old], kind, name)
        usual = median(took) if len(took) >= FEWEST_ALIKE else None
        late = [each for each in old if usual is None or each[0] >= WAITING_TIMES * usual]
        if late and (usual is not None or stands_s is not None):
            yield _sample(kind, name, late, usual, [of.process for of in found if of.process is not None])


def _sample(
    kind: str,
    name: str,
    late: Sequence[tuple[float, OpenSpan, Spans]],
    usual: float | None,
    processes: Sequence[Process],
) -> Said:
    age, span, of = late[0]
    inside = f"in {kind} {name}" if kind != "sample" else "with no turn or tool open"
    work = next((each for each in of.process.working if span in each.spans), None) if of.process is not None else None
    here = f"; it is in {work.place}" if work is not None else ""
    if (work is None or not work.own) and (asked := elsewhere(processes)):
        here = f"; {asked}"
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
        for line in tails.spans(there[stem])
        if line.kind == kind and line.name == name
    ]


def late_stages(found: Sequence[Spans], labels: Mapping[tuple[str, int], str]) -> Iterator[Said]:
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
        here = f"; {plural(ranks, 'it is', 'they are')} in {at.pop()}" if len(at) == 1 else ""
        most = Counter(other.name for other in others).most_common(1)[0][0]
        who = f"{name_ranks(ranks, span.role)} {plural(ranks, 'is', 'are')}"
        text = f"{who} in {span.name} since {seconds(age)}"
        yield Said(f"{text}, {several(len(others), 'other')} in {most}{here}", [], f"timeline/{of.host}-{of.pid}.jsonl")


# A sample or a request is long that is older than this, or than half of a step that stands.
OLD_S = 60.0
# Kinds of spans of which a step has thousands.
OF_SAMPLES = ("sample", "turn", "tool", "reward", "request")


class Said(msgspec.Struct, frozen=True):
    """A statement, its evidence, and the file that has it."""

    text: str
    evidence: list[str] = []
    file: str = ""


def by_itself(processes: Sequence[Process], over: bool) -> Iterator[Said]:
    """Name processes that wait for themselves: deadlocks of two locks, and actors that ask themselves.

    Args:
        processes: The processes.
        over: Whether the step has ended; a deadlock does not end, so none is named then.
    """
    for process in processes:
        if process.deadlock and not over:
            yield Said(process.deadlock.replace("{process}", process.name), _stack(process), process.file)
        elif process.itself:
            text = (
                f"{process.name} waits for itself: ray.get in {process.itself} asks for what the actor itself is to do"
            )
            yield Said(text, _stack(process), process.file)


def held_up(processes: Sequence[Process], age_s: float) -> Iterator[Said]:
    """Name tasks that block their event loop, so that its other tasks can't run."""
    for process in processes:
        if process.held_up is None:
            continue
        work, waiting = process.held_up
        span = next((span for span in reversed(work.spans) if span.kind in OF_SAMPLES), None)
        long = span is not None and (process.unix_ns - span.start_ns) / 1e9 >= min(OLD_S, age_s / 2)
        if span is None or not long:
            continue
        who = where(msgspec.structs.replace(span, role=""))
        doing = f"{span.kind} {span.name} of {who}" if who else f"{span.kind} {span.name}"
        text = f"{doing} holds up the event loop of {process.name}, where {several(waiting, 'task')} wait"
        yield Said(f"{text}; it is in {work.place}", _stack(process), process.file)


def flight_records(processes: Sequence[Process]) -> list[Record]:
    """Return the flight records, without those of processes that share a title and a rank: they can't be told apart."""
    ranks = Counter((process.world, process.joined_as) for process in processes if process.flight_record)
    return [
        Record(process.flight_record, process.joined_as, process.world)
        for process in processes
        if process.flight_record and process.joined_as is not None and ranks[process.world, process.joined_as] == 1
    ]


def collective(stuck: Stuck, processes: Sequence[Process]) -> Said:
    """Name the ranks that did not join a collective, or called another one."""
    of = {process.joined_as: process for process in processes if process.world == stuck.world}
    role = read.roles(processes).get(next(iter(of.values())).label, "") if of else ""
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
    evidence = [f"{name_ranks(stuck.waiting, '')} {plural(stuck.waiting, 'waits', 'wait')} in it", group]
    if caller := places.told(stuck.frames):
        evidence[0] += f", called in {places.text(caller)}"
    if stuck.unknown:
        evidence.append(f"of {name_ranks(stuck.unknown, role)} there is no record")
    if stuck.late:
        found = [process for rank in stuck.late if (process := of.get(rank)) is not None]
        at = list(dict.fromkeys(process.place for process in found if process.place))
        here = f"; {plural(stuck.late, 'it is', 'they are')} in {at[0]}" if len(at) == 1 else ""
        text = f"{name_ranks(stuck.late, role)} {plural(stuck.late, 'has', 'have')} not joined {call}{stage}{here}"
        evidence += [line for process in found[:1] for line in _stack(process)]
        return Said(text, evidence, found[0].file if found else "")
    others = list(stuck.other.items())
    rank, what = others[0]
    alike = [each for each, other in others if other == what]
    called = f"{name_ranks(alike, role)} called {what} as #{stuck.number}{stage}, {_rest(stuck, alike)} {stuck.called}"
    more = [f"rank {each} called {other}" for each, other in others if other != what]
    return Said(called, [*more[:5], *evidence], of[rank].file if rank in of else "")


def _rest(stuck: Stuck, alike: Sequence[int]) -> str:
    rest = [rank for rank in stuck.waiting if rank not in alike]
    return f"rank {rest[0]}" if len(rest) == 1 else "the others"


def busy_engines(processes: Sequence[Process], age_s: float) -> Iterator[Said]:
    """Name engines whose requests wait although none runs, no block is free, or one runs for long."""
    for process in processes:
        running, waiting, free, longest = (
            value if isinstance(value := process.engine.get(name), (int, float)) else None
            for name in ("running", "waiting", "free_blocks", "longest_s")
        )
        who = f"replica {process.replica}" if process.replica is not None else process.name
        here = f"; it is in {process.place}" if process.place and not process.waits else ""
        state = [", ".join(f"{name} {value}" for name, value in sorted(process.engine.items()))]
        requests = several(int(waiting or 0), "request")
        if waiting and free == 0:
            yield Said(f"{who} has {requests} waiting and no free block", state, process.file)
        elif waiting and not running:
            yield Said(f"{who} has {requests} waiting and none running{here}", state, process.file)
        elif (running or waiting) and longest is not None and longest >= min(OLD_S, age_s / 2):
            text = f"{who} has {several(int(running or 0), 'request')} running and {int(waiting or 0)} waiting"
            yield Said(f"{text}, the longest since {seconds(longest)}{here}", state, process.file)


def stack_sentences(processes: Sequence[Process]) -> Iterator[Said]:
    """Name processes that are not in the collective, or not at the place, of the others with the same title."""
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
        text = f"{names} {plural(others, 'is', 'are')} in {late.place}, {several(len(waiting), 'other')} {what}"
        yield Said(text, _stack(late), late.file)


def busy(processes: Sequence[Process]) -> Iterator[Said]:
    """Name the places of processes that have an open stage or step and wait for no other process."""
    found = [
        (process, work)
        for process in processes
        for work in process.working[:1]
        if (process.spans or work.own) and (process.waits not in (places.COLLECTIVE, places.RAY) or not work.main)
    ]
    found.sort(
        key=lambda each: (not each[1].own, each[0].stage is None, not each[1].main, each[0].waits == places.IDLE)
    )
    for process, work in found[:3]:
        stage = f" in {process.stage.name}" if process.stage is not None else ""
        doing = f"waits for {work.who}" if work.awaited else "is"
        yield Said(f"{process.name} {doing} in {work.place}{stage}", _stack(process), process.file)


def waiting(processes: Sequence[Process]) -> Iterator[Said]:
    """Name the places where processes wait; for steps in which all of them do."""
    found = [process for process in processes if process.spans and process.place]
    # Who waits for Ray waits for one of the others.
    for process in sorted(found, key=lambda each: (each.waits == places.RAY, each.stage is None))[:3]:
        what = f" ({process.waits})" if process.waits in (places.COLLECTIVE, places.RAY) else ""
        stage = f" of {process.stage.name}" if process.stage is not None else ""
        yield Said(f"{process.name} waits in {process.place}{stage}{what}", _stack(process), process.file)


def elsewhere(processes: Sequence[Process]) -> str:
    """Name the only process without open spans that is in the user's code; others may be waiting for it."""
    found = {
        work.place: process
        for process in processes
        for work in process.working
        if work.own and not process.spans and (process.waits == places.IDLE or work.main)
    }
    return "; ".join(f"{process.name} is in {place}" for place, process in found.items()) if len(found) == 1 else ""


def _stack(process: Process) -> list[str]:
    inner = [places.text(frame) for frame in process.stack[-4:]]
    return [f"{process.name}, {process.thread}: {' > '.join(inner)}"] if inner else []


def name_ranks(numbers: Sequence[int], role: str) -> str:
    """Name ranks: `ranks 3, 5 of actor`."""
    of = f" of {role}" if role else ""
    return f"{plural(numbers, 'rank', 'ranks')} {listed(map(str, numbers), 8)}{of}"


def plural(things: Sequence[object], one: str, many: str) -> str:
    """Return the word for one thing, or for many."""
    return one if len(things) == 1 else many


HANG = "hang"
KINDS.append(HANG)
# Without `hangs/` a step is stuck if it takes TIMES the median of FEWEST steps, and at least LEAST_S, or if no span has
# begun or ended for STILL_S. A run that begins no further step is stuck after STILL_S, too.
TIMES, FEWEST, LEAST_S, STILL_S = 5, 3, 60.0, 600.0
_THERE = (open_spans.RUNNING, open_spans.ELSEWHERE)
_MOST_NOTES = 5


def hangs_of_run(run: str, opened: OpenSpans, ended_s: Mapping[int, float]) -> tuple[list[Finding], list[str]]:
    """Return the findings of steps that are or were stuck, and notes on what could not be read. Raises nothing.

    Args:
        run: The run's directory.
        opened: What is open in it.
        ended_s: The seconds of the steps that have ended, by number.
    """
    found, notes = [], []
    for hang in read.read_hangs(run):
        finding, left_out = _of_hang(run, hang, opened, ended_s)
        found += [finding] if finding is not None else []
        notes += [f"{hang.folder}: {line}" for line in left_out[:_MOST_NOTES]]
    open_step = _open_step(opened, _THERE)
    if open_step is not None and open_step[1].step not in {finding.step for finding in found}:
        found += _of_spans(run, opened, ended_s, *open_step)
    elif _open_step(opened) is None:
        found += _between_steps(run, opened, ended_s)
    return found, notes


def _of_hang(run: str, hang: Hang, opened: OpenSpans, ended_s: Mapping[int, float]) -> tuple[Finding | None, list[str]]:
    processes = hang.processes
    if not processes and not hang.why.since_ns:
        return None, hang.left_out
    at = hang.why.unix_ns or max((process.unix_ns for process in processes), default=0)
    begun = [(span.kind != "step", span.start_ns) for process in processes for span in process.spans]
    since = hang.why.since_ns or min(begun, default=(True, at))[1]
    took = ended_s.get(hang.step) if hang.step is not None else None
    standing_s = _open_for(opened, hang.step)
    if standing_s is None and took is not None:
        # Whoever was asked when the step was over tells of the next one.
        processes = [process for process in processes if process.unix_ns <= since + took * 1e9]
        if hang.processes and not processes:
            return None, hang.left_out
    going_on = opened.going_on and hang.step is not None and (standing_s is not None or took is None)
    if standing_s is None and took is not None:
        age = took
    else:
        # Of one that was killed the last line of its timeline may be older than what it left here.
        until = max(opened.ends_ns, default=at) if going_on else at
        age = max(standing_s or 0.0, (until - since) / 1e9)
    stuck, left_out = collectives.stuck(flight_records(processes))
    spans = [_open_still(each, opened) if going_on else _then(each) for each in processes]
    labels = {(process.host, process.pid): process.label for process in processes}
    in_collectives = [collective(each, processes) for each in stuck]
    told = {each.world for each in stuck}
    rest = [each for each in processes if each.world not in told]
    engines = list(busy_engines(processes, age))
    said = list(
        chain(
            by_itself(processes, over=not going_on and standing_s is None and took is not None),
            held_up(processes, (at - since) / 1e9),
            in_collectives,
            engines,
            waiting_samples(run, spans, min(age, (at - since) / 1e9)),
            late_stages(spans, labels) if not stuck else (),
            stack_sentences(rest),
        )
    )
    said = said or list(busy(processes)) or list(waiting(processes)) or list(_innermost(spans))
    return _finding(hang.step, age, going_on, said, hang.folder), [*hang.left_out, *left_out]


def _then(process: Process) -> Spans:
    """Return what was open in a process when it was asked."""
    return Spans(process.host, process.pid, process.spans, process.unix_ns, process)


def _open_still(process: Process, opened: OpenSpans) -> Spans:
    """Return what was open in a process when it was asked, and still is: by now it is older."""
    for state, end in zip(opened.states, opened.ends_ns, strict=True):
        if (state.host, state.pid) == (process.host, process.pid):
            there = {(span.kind, span.name, span.start_ns) for span in state.spans}
            if still := [span for span in process.spans if (span.kind, span.name, span.start_ns) in there]:
                return Spans(process.host, process.pid, still, end, process)
    return _then(process)


def _of_spans(
    run: str, opened: OpenSpans, ended_s: Mapping[int, float], age: float, step: OpenSpan
) -> Iterator[Finding]:
    """Report the open step from the timeline alone, if it takes far longer than the others or nothing happens in it."""
    if not opened.going_on:
        return
    usual = median(ended_s.values()) if ended_s else 0.0
    still = opened.still_s() >= max(STILL_S, TIMES * usual)
    if not still and (len(ended_s) < FEWEST or age < max(LEAST_S, TIMES * usual)):
        return
    spans = [
        Spans(state.host, state.pid, state.spans, end)
        for state, end in zip(opened.states, opened.ends_ns, strict=True)
        if state.state in _THERE
    ]
    said = [*waiting_samples(run, spans, age if still else None), *late_stages(spans, {})]
    finding = _finding(step.step, age, True, said or list(_innermost(spans)), "")
    evidence = [*finding.evidence, *_compared(run, opened, usual)]
    yield Finding(kind=HANG, text=finding.text, evidence=evidence, seconds=age, step=step.step, file=finding.file)


def _between_steps(run: str, opened: OpenSpans, ended_s: Mapping[int, float]) -> Iterator[Finding]:
    """Report a running run that has ended steps and begins no further one, unless its trainer has exited."""
    drivers = [(opened.shifted(state, state.stepped.end_ns), state) for state in opened.states if state.stepped]
    if not opened.going_on or not drivers or layout.switched_off(RunDir(Path(run))):
        return
    end_ns, driver = max(drivers, key=lambda each: each[0])
    usual = median(ended_s.values()) if ended_s else 0.0
    if driver.stepped is None or opened.still_s() < max(STILL_S, TIMES * usual):
        return
    # Which process is the trainer of a resumed run is known with its first step.
    resumed = end_ns < opened.started_ns
    if driver.state == open_spans.EXITED and not resumed:
        return
    age = max(0.0, (opened.now_ns - max(end_ns, opened.started_ns)) / 1e9)
    since = "the run was resumed" if resumed else f"step {driver.stepped.step} ended; {_driver(driver)}"
    yield Finding(
        kind=HANG,
        text=writable(f"no step has begun for {seconds(age)} since {since}"),
        evidence=_compared(run, opened, usual),
        seconds=age,
        file=None if resumed else f"timeline/{driver.file.name}",
    )


def _driver(state: ProcessState) -> str:
    """Return in words whether the process that drives the steps is alive."""
    name = " ".join(filter(None, ["process", state.stepped.role if state.stepped else "", f"(pid {state.pid})"]))
    return {
        open_spans.RUNNING: f"{name} is alive",
        open_spans.GONE: f"{name} is gone",
        open_spans.ELSEWHERE: f"{name} ran on {state.host}, and this host can't tell whether it is alive",
    }[state.state]


def _compared(run: str, opened: OpenSpans, usual: float) -> list[str]:
    """Return how long the steps took that have ended, how long nothing has happened, and the command to run next."""
    return [
        f"the median step took {seconds(usual)}" if usual else "no step has ended yet",
        f"no span has begun or ended for {seconds(opened.still_s())}",
        f"autoprof stacks {Path(run).name} shows where each process is",
    ]


def _innermost(spans: Sequence[Spans]) -> Iterator[Said]:
    """Name the stage that began last in the process of the step, if nothing else is known."""
    for of in spans:
        if any(span.kind == "step" for span in of.spans):
            inner = [span for span in of.spans if span.kind in ("stage", "timer")]
            if inner:
                age = max(0.0, (of.end_ns - inner[-1].start_ns) / 1e9)
                yield Said(f"{inner[-1].role or 'the trainer'} has been in {inner[-1].name} for {seconds(age)}")
            else:
                yield Said("no stage is open in it")


def _finding(step: int | None, age: float, going_on: bool, said: Iterable[Said], folder: str) -> Finding:
    first, *rest = [*said] or [Said("no process reports where it is")]
    which = "the run" if step is None else f"step {step}"
    begin = f"{which} {'has been' if going_on else 'was'} stuck for {seconds(age)}"
    evidence = [*first.evidence, *(each.text for each in rest[:4])]
    evidence += [f"the stacks of all processes are in {folder}"] if folder else []
    return Finding(
        kind=HANG,
        text=f"{begin}: {first.text}",
        evidence=evidence,
        seconds=age,
        step=step,
        file=first.file or folder or None,
    )


def _open_step(opened: OpenSpans, within: Container[str] | None = None) -> tuple[float, OpenSpan] | None:
    """Return the open step of a run and its age, of processes in these states only."""
    found = [
        (opened.age_s(place, span), span)
        for place, state in enumerate(opened.states)
        for span in state.spans
        if span.kind == "step" and span.step is not None and (within is None or state.state in within)
    ]
    return max(found, key=lambda each: each[1].start_ns, default=None)


def _open_for(opened: OpenSpans, step: int | None) -> float | None:
    found = _open_step(opened)
    return found[0] if found is not None and found[1].step == step else None
