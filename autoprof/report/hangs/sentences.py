"""Sentences about steps that are stuck: one function per kind of evidence, the most certain first.

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
from autoprof.report.figures.words import name_ranks, plural, several
from autoprof.report.findings.rules import KINDS
from autoprof.report.hangs import collectives, places, read
from autoprof.report.hangs.collectives import collective, flight_records
from autoprof.report.hangs.read import Hang, OpenSpans, Process, Sentence, where
from autoprof.report.model import Finding
from autoprof.rundir import journal, layout, processes
from autoprof.rundir.layout import RunDir
from autoprof.rundir.processes import ProcessState
from autoprof.rundir.records import OpenSpan

# A sample is reported as waiting if it is older than `OLD_S` and than this many medians of the same kind of span.
WAITING_RATIO = 5
# Ended spans that the median needs.
MIN_ENDED_SPANS = 3
# Journals that are searched for ended spans.
_MAX_FILES = 8


class Spans(msgspec.Struct, frozen=True):
    """Open spans of one process.

    Attributes:
        end_ns: The moment up to which they are known to be open.
    """

    host: str
    pid: int
    spans: Sequence[OpenSpan]
    end_ns: int
    process: Process | None = None


def waiting_samples(run_path: str, processes: Sequence[Spans], stuck_s: float | None) -> Iterator[Sentence]:
    """Report samples, turns, tools and rewards that wait far longer than usual, the oldest first.

    Args:
        run_path: The run's directory.
        processes: The open spans of its processes.
        stuck_s: The age of the step if it is known to be stuck. Spans without a usual duration are then reported too.
    """
    least = OLD_S if stuck_s is None else min(OLD_S, stuck_s / 2)
    inner: dict[tuple[str, int, str], tuple[OpenSpan, Spans]] = {}
    for of in processes:
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
        took = _ended_s(run_path, [of for _, _, of in old], kind, name)
        usual = median(took) if len(took) >= MIN_ENDED_SPANS else None
        late = [each for each in old if usual is None or each[0] >= WAITING_RATIO * usual]
        if late and (usual is not None or stuck_s is not None):
            yield _sample(kind, name, late, usual, [of.process for of in processes if of.process is not None])


def _sample(
    kind: str,
    name: str,
    late: Sequence[tuple[float, OpenSpan, Spans]],
    usual: float | None,
    processes: Sequence[Process],
) -> Sentence:
    age, span, of = late[0]
    inside = f"in {kind} {name}" if kind != "sample" else "with no turn or tool open"
    work = next((each for each in of.process.working if span in each.spans), None) if of.process is not None else None
    here = f"; it is in {work.place}" if work is not None else ""
    if (work is None or not work.own) and (only_process := elsewhere(processes)):
        here = f"; {only_process}"
    owner = where(msgspec.structs.replace(span, role="")) or name
    text = f"{owner} has waited {seconds(age)} {inside}{here}"
    if len(late) > 1:
        thing = "request" if kind == "request" else "sample"
        text = f"{several(len(late), thing)} have waited up to {seconds(age)} {inside}{here}"
    evidence = [f"{where(each)}: {seconds(age_s)}, {spans.host} {spans.pid}" for age_s, each, spans in late[:4]]
    evidence += [f"usually {seconds(usual)}"] if usual is not None else []
    return Sentence(text, evidence, f"journal/{of.host}-{of.pid}.jsonl")


def _ended_s(run_path: str, processes: Sequence[Spans], kind: str, name: str) -> list[float]:
    """Return the seconds of recently ended spans with this kind and name, from the timelines of these processes."""
    of_processes = dict.fromkeys((of.host, of.pid) for of in processes)
    files = [file for file in journal.journals(run_path) if (file.host, file.pid) in of_processes][:_MAX_FILES]
    return [
        (span.end_ns - span.start_ns) / 1e9
        for file in files
        for span in journal.recent_spans(file)
        if span.kind == kind and span.name == name
    ]


def late_stages(processes: Sequence[Spans], labels: Mapping[tuple[str, int], str]) -> Iterator[Sentence]:
    """Report ranks that are in an earlier stage than the other ranks of their role.

    Args:
        processes: The open spans of each process.
        labels: Labels of processes, by host and pid. Without a label, the role groups the processes.
    """
    groups: dict[str, list[tuple[Spans, OpenSpan]]] = defaultdict(list)
    for of in processes:
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
        text = f"{name_ranks(ranks, span.role)} {plural(ranks, 'has', 'have')} been in {span.name} for {seconds(age)}"
        yield Sentence(
            f"{text}, {several(len(others), 'other')} in {most}{here}", [], f"journal/{of.host}-{of.pid}.jsonl"
        )


# Age in seconds from which a sample or a request is old. Half the age of a stuck step applies if that is less.
OLD_S = 60.0
# Kinds of spans that a step may have by the thousand.
OF_SAMPLES = ("sample", "turn", "tool", "reward", "request")


def deadlocks(processes: Sequence[Process], over: bool) -> Iterator[Sentence]:
    """Report deadlocks within a process: two locks, or a Ray actor that waits for its own result.

    Args:
        processes: The processes.
        over: True if the step has ended. A deadlock never ends, so none is reported then.
    """
    for process in processes:
        if process.deadlock and not over:
            yield Sentence(process.deadlock.replace("{process}", process.name), process.stack_lines(), process.file)
        elif process.itself:
            text = f"{process.name} waits for itself: ray.get in {process.itself} waits for a call to the same actor"
            yield Sentence(text, process.stack_lines(), process.file)


def held_up(processes: Sequence[Process], age_s: float) -> Iterator[Sentence]:
    """Report tasks that block their event loop, so that its other tasks can't run."""
    for process in processes:
        if process.held_up is None:
            continue
        work, waiting = process.held_up
        span = next((span for span in reversed(work.spans) if span.kind in OF_SAMPLES), None)
        long = span is not None and (process.unix_ns - span.start_ns) / 1e9 >= min(OLD_S, age_s / 2)
        if span is None or not long:
            continue
        owner = where(msgspec.structs.replace(span, role=""))
        blocker = f"{span.kind} {span.name} of {owner}" if owner else f"{span.kind} {span.name}"
        tasks = f"{several(waiting, 'task')} {'waits' if waiting == 1 else 'wait'}"
        text = f"{blocker} blocks the event loop of {process.name}, where {tasks}"
        yield Sentence(f"{text}; it is in {work.place}", process.stack_lines(), process.file)


def busy_engines(processes: Sequence[Process], age_s: float) -> Iterator[Sentence]:
    """Report engines with waiting requests and none running or no free block, and engines with a very old request."""
    for process in processes:
        running, waiting, free, longest = (
            value if isinstance(value := process.engine.get(key), (int, float)) else None
            for key in ("running", "waiting", "free_blocks", "longest_s")
        )
        name = f"replica {process.replica}" if process.replica is not None else process.name
        here = f"; it is in {process.place}" if process.place and not process.waits else ""
        state = [", ".join(f"{key} {value}" for key, value in sorted(process.engine.items()))]
        requests = several(int(waiting or 0), "request")
        if waiting and free == 0:
            yield Sentence(f"{name} has {requests} waiting and no free block", state, process.file)
        elif waiting and not running:
            yield Sentence(f"{name} has {requests} waiting and none running{here}", state, process.file)
        elif (running or waiting) and longest is not None and longest >= min(OLD_S, age_s / 2):
            text = f"{name} has {several(int(running or 0), 'request')} running and {int(waiting or 0)} waiting"
            yield Sentence(f"{text}, the oldest for {seconds(longest)}{here}", state, process.file)


def stack_sentences(processes: Sequence[Process]) -> Iterator[Sentence]:
    """Report processes that are not where most processes with the same title are: in a collective, or in a function."""
    by_label: dict[str, list[Process]] = defaultdict(list)
    for process in processes:
        if process.stack:
            by_label[process.label].append(process)
    for alike in by_label.values():
        waiting = [process for process in alike if process.waits == places.COLLECTIVE]
        others = [process for process in alike if process.waits not in (places.COLLECTIVE, places.IDLE)]
        most_are = places.COLLECTIVE
        if not waiting:
            place, count = Counter(process.place for process in others).most_common(1)[0] if others else ("", 0)
            if count < 2:
                continue
            waiting, most_are = [each for each in others if each.place == place], f"in {place}"
            others = [process for process in others if process.place != place]
        if not others or len(others) > len(waiting):
            continue
        late = others[0]
        names = late.name if len(others) == 1 else f"{late.name} and {several(len(others) - 1, 'other')}"
        text = f"{names} {plural(others, 'is', 'are')} in {late.place}, {several(len(waiting), 'other')} {most_are}"
        yield Sentence(text, late.stack_lines(), late.file)


def busy(processes: Sequence[Process]) -> Iterator[Sentence]:
    """Report where processes are that have open spans or run user code, and that wait for no other process."""
    workers = [
        (process, work)
        for process in processes
        for work in process.working[:1]
        if (process.spans or work.own) and (process.waits not in (places.COLLECTIVE, places.RAY) or not work.main)
    ]
    workers.sort(
        key=lambda each: (not each[1].own, each[0].stage is None, not each[1].main, each[0].waits == places.IDLE)
    )
    for process, work in workers[:3]:
        stage = f" in {process.stage.name}" if process.stage is not None else ""
        doing = f"waits for {work.who}" if work.awaited else "is"
        yield Sentence(f"{process.name} {doing} in {work.place}{stage}", process.stack_lines(), process.file)


def waiting(processes: Sequence[Process]) -> Iterator[Sentence]:
    """Report where processes wait. This is for steps in which every process waits."""
    placed = [process for process in processes if process.spans and process.place]
    # A process in ray.get waits for one of the others, so it comes last.
    for process in sorted(placed, key=lambda each: (each.waits == places.RAY, each.stage is None))[:3]:
        call = f" ({process.waits})" if process.waits in (places.COLLECTIVE, places.RAY) else ""
        stage = f" of {process.stage.name}" if process.stage is not None else ""
        yield Sentence(f"{process.name} waits in {process.place}{stage}{call}", process.stack_lines(), process.file)


def elsewhere(processes: Sequence[Process]) -> str:
    """Return where the only process without open spans that runs user code is. Others may wait for it.

    Empty if no place, or more than one, is found.
    """
    by_place = {
        work.place: process
        for process in processes
        for work in process.working
        if work.own and not process.spans and (process.waits == places.IDLE or work.main)
    }
    if len(by_place) != 1:
        return ""
    return "; ".join(f"{process.name} is in {place}" for place, process in by_place.items())


HANG = "hang"
KINDS.append(HANG)
# Limits for steps without stacks in `hangs/`. A step is stuck from this many median steps on ...
TIMES = 5
# ... if this many steps have ended ...
MIN_ENDED_STEPS = 3
# ... and it is at least this old.
LEAST_S = 60.0
# Seconds without a new or ended span after which the open step, or a run between two steps, is stuck.
STILL_S = 600.0
_MAYBE_RUNNING = (processes.RUNNING, processes.ELSEWHERE)
_MAX_NOTES = 5


def hangs_of_run(run_path: str, opened: OpenSpans, ended_s: Mapping[int, float]) -> tuple[list[Finding], list[str]]:
    """Return the findings about steps that are or were stuck, and notes on unreadable files. Never raises.

    Args:
        run_path: The run's directory.
        opened: Its open spans.
        ended_s: The seconds of the steps that have ended, by number.
    """
    findings, notes = [], []
    for hang in read.read_hangs(run_path):
        finding, left_out = _of_hang(run_path, hang, opened, ended_s)
        findings += [finding] if finding is not None else []
        notes += [f"{hang.folder}: {line}" for line in left_out[:_MAX_NOTES]]
    open_step = _open_step(opened, _MAYBE_RUNNING)
    if open_step is not None and open_step[1].step not in {finding.step for finding in findings}:
        findings += _of_spans(run_path, opened, ended_s, *open_step)
    elif _open_step(opened) is None:
        findings += _between_steps(run_path, opened, ended_s)
    return findings, notes


def _of_hang(
    run_path: str, hang: Hang, opened: OpenSpans, ended_s: Mapping[int, float]
) -> tuple[Finding | None, list[str]]:
    processes = hang.processes
    if not processes and not hang.why.since_ns:
        return None, hang.left_out
    at = hang.why.unix_ns or max((process.unix_ns for process in processes), default=0)
    begun = [(span.kind != "step", span.start_ns) for process in processes for span in process.spans]
    since = hang.why.since_ns or min(begun, default=(True, at))[1]
    took = ended_s.get(hang.step) if hang.step is not None else None
    open_s = _open_for(opened, hang.step)
    if open_s is None and took is not None:
        # A process that wrote its stacks after the step's end shows the next step.
        processes = [process for process in processes if process.unix_ns <= since + took * 1e9]
        if hang.processes and not processes:
            return None, hang.left_out
    going_on = opened.going_on and hang.step is not None and (open_s is not None or took is None)
    if open_s is None and took is not None:
        age = took
    else:
        # The last timeline line of a killed process may be older than its stacks.
        until = max(opened.ends_ns, default=at) if going_on else at
        age = max(open_s or 0.0, (until - since) / 1e9)
    stuck, left_out = collectives.stuck(flight_records(processes))
    spans = [_open_still(each, opened) if going_on else _spans_then(each) for each in processes]
    labels = {(process.host, process.pid): process.label for process in processes}
    in_collectives = [collective(each, processes) for each in stuck]
    reported = {each.world for each in stuck}
    engines = list(busy_engines(processes, age))
    sentences = list(
        chain(
            deadlocks(processes, over=not going_on and open_s is None and took is not None),
            held_up(processes, (at - since) / 1e9),
            in_collectives,
            engines,
            waiting_samples(run_path, spans, min(age, (at - since) / 1e9)),
            late_stages(spans, labels) if not stuck else (),
            stack_sentences([each for each in processes if each.world not in reported]),
        )
    )
    sentences = sentences or list(busy(processes)) or list(waiting(processes)) or list(_innermost(spans))
    return _finding(hang.step, age, going_on, sentences, hang.folder), [*hang.left_out, *left_out]


def _spans_then(process: Process) -> Spans:
    """Return the spans that were open when the process wrote its stacks."""
    return Spans(process.host, process.pid, process.spans, process.unix_ns, process)


def _open_still(process: Process, opened: OpenSpans) -> Spans:
    """Return the spans that were open when the process wrote its stacks and are open now, with their age of now."""
    for state, end in zip(opened.states, opened.ends_ns, strict=True):
        if (state.host, state.pid) == (process.host, process.pid):
            open_now = {(span.kind, span.name, span.start_ns) for span in state.spans}
            if still := [span for span in process.spans if (span.kind, span.name, span.start_ns) in open_now]:
                return Spans(process.host, process.pid, still, end, process)
    return _spans_then(process)


def _of_spans(
    run_path: str, opened: OpenSpans, ended_s: Mapping[int, float], age: float, step: OpenSpan
) -> Iterator[Finding]:
    """Report the open step, from the timeline alone, if it takes far longer than others or nothing happens in it."""
    if not opened.going_on:
        return
    usual = median(ended_s.values()) if ended_s else 0.0
    still = opened.still_s() >= max(STILL_S, TIMES * usual)
    if not still and (len(ended_s) < MIN_ENDED_STEPS or age < max(LEAST_S, TIMES * usual)):
        return
    spans = [
        Spans(state.host, state.pid, state.spans, end)
        for state, end in zip(opened.states, opened.ends_ns, strict=True)
        if state.state in _MAYBE_RUNNING
    ]
    sentences = [*waiting_samples(run_path, spans, age if still else None), *late_stages(spans, {})]
    finding = _finding(step.step, age, True, sentences or list(_innermost(spans)), "")
    evidence = [*finding.evidence, *_evidence(run_path, opened, usual)]
    yield Finding(kind=HANG, text=finding.text, evidence=evidence, seconds=age, step=step.step, file=finding.file)


def _between_steps(run_path: str, opened: OpenSpans, ended_s: Mapping[int, float]) -> Iterator[Finding]:
    """Report a running run that has ended steps and begins no new one, unless its trainer has exited."""
    drivers = [(opened.shifted(state, state.stepped.end_ns), state) for state in opened.states if state.stepped]
    if not opened.going_on or not drivers or layout.switched_off(RunDir(Path(run_path))):
        return
    end_ns, driver = max(drivers, key=lambda each: each[0])
    usual = median(ended_s.values()) if ended_s else 0.0
    if driver.stepped is None or opened.still_s() < max(STILL_S, TIMES * usual):
        return
    # The trainer process of a resumed run is unknown until its first step.
    resumed = end_ns < opened.started_ns
    if driver.state == processes.EXITED and not resumed:
        return
    age = max(0.0, (opened.now_ns - max(end_ns, opened.started_ns)) / 1e9)
    since = "the run was resumed" if resumed else f"step {driver.stepped.step} ended; {_driver(driver)}"
    yield Finding(
        kind=HANG,
        text=writable(f"no step has begun for {seconds(age)} since {since}"),
        evidence=_evidence(run_path, opened, usual),
        seconds=age,
        file=None if resumed else f"journal/{driver.file.name}",
    )


def _driver(state: ProcessState) -> str:
    """Return a sentence that says if the process that drives the steps is alive."""
    name = " ".join(filter(None, ["process", state.stepped.role if state.stepped else "", f"(pid {state.pid})"]))
    return {
        processes.RUNNING: f"{name} is alive",
        processes.GONE: f"{name} is gone",
        processes.ELSEWHERE: f"{name} is on {state.host}; from this host autoprof can't see if it is alive",
    }[state.state]


def _evidence(run_path: str, opened: OpenSpans, usual: float) -> list[str]:
    """Return lines with the median step, the time since the last span began or ended, and the command to run next."""
    return [
        f"the median step took {seconds(usual)}" if usual else "no step has ended yet",
        f"no span has begun or ended for {seconds(opened.still_s())}",
        f"autoprof stacks {Path(run_path).name} shows where each process is",
    ]


def _innermost(spans: Sequence[Spans]) -> Iterator[Sentence]:
    """Report the last stage that began in the process of the step. This is for steps without other evidence."""
    for of in spans:
        if any(span.kind == "step" for span in of.spans):
            inner = [span for span in of.spans if span.kind in ("stage", "timer")]
            if inner:
                age = max(0.0, (of.end_ns - inner[-1].start_ns) / 1e9)
                yield Sentence(f"{inner[-1].role or 'the trainer'} has been in {inner[-1].name} for {seconds(age)}")
            else:
                yield Sentence("no stage is open in this step")


def _finding(step: int | None, age: float, going_on: bool, sentences: Iterable[Sentence], folder: str) -> Finding:
    first, *others = [*sentences] or [Sentence("no process reports where it is")]
    subject = "the run" if step is None else f"step {step}"
    begin = f"{subject} {'has been' if going_on else 'was'} stuck for {seconds(age)}"
    evidence = [*first.evidence, *(each.text for each in others[:4])]
    evidence += [f"the stacks of all processes are in {folder}"] if folder else []
    return Finding(
        kind=HANG,
        text=f"{begin}: {first.text}",
        evidence=evidence,
        seconds=age,
        step=step,
        file=first.file or folder or None,
    )


def _open_step(opened: OpenSpans, states: Container[str] | None = None) -> tuple[float, OpenSpan] | None:
    """Return the age in seconds and the span of the open step that began last, in processes in these states."""
    steps = [
        (opened.age_s(place, span), span)
        for place, state in enumerate(opened.states)
        for span in state.spans
        if span.kind == "step" and span.step is not None and (states is None or state.state in states)
    ]
    return max(steps, key=lambda each: each[1].start_ns, default=None)


def _open_for(opened: OpenSpans, step: int | None) -> float | None:
    open_step = _open_step(opened)
    return open_step[0] if open_step is not None and open_step[1].step == step else None
