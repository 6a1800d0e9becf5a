"""Rule of hangs: the step that is stuck, who is late in it and where, and runs that begin no further step."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import median

from autoprof.base.redact import writable
from autoprof.base.units import seconds
from autoprof.report.figures import collectives, hangs, standing, waiting_spans
from autoprof.report.figures.hangs import Hang, Process
from autoprof.report.figures.open_now import OpenSpans
from autoprof.report.figures.standing import Said
from autoprof.report.figures.waiting_spans import Spans
from autoprof.report.findings.registry import KINDS
from autoprof.report.model.run import Finding
from autoprof.rundir import layout, open_spans
from autoprof.rundir.layout import RunDir
from autoprof.rundir.open_spans import ProcessState
from autoprof.rundir.stacks import OpenSpan

HANG = "hang"
KINDS.append(HANG)
# Without `hangs/` a step is stuck if it takes TIMES the median of FEWEST steps, and at least LEAST_S, or if no span has
# begun or ended for STILL_S. A run that begins no further step is stuck after STILL_S, too.
TIMES, FEWEST, LEAST_S, STILL_S = 5, 3, 60.0, 600.0
_THERE = (open_spans.RUNNING, open_spans.ELSEWHERE)
_MOST_NOTES = 5


def of_run(run: str, opened: OpenSpans, ended_s: Mapping[int, float]) -> tuple[list[Finding], list[str]]:
    """Return the findings of steps that are or were stuck, and notes on what could not be read. Raises nothing.

    Args:
        run: The run's directory.
        opened: What is open in it.
        ended_s: The seconds of the steps that have ended, by number.
    """
    found, notes = [], []
    for hang in hangs.read(run):
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
    stuck, left_out = collectives.stuck(standing.records(processes))
    spans = [_open_still(each, opened) if going_on else _then(each) for each in processes]
    labels = {(process.host, process.pid): process.label for process in processes}
    in_collectives = [standing.collective(each, processes) for each in stuck]
    told = {each.world for each in stuck}
    rest = [each for each in processes if each.world not in told]
    engines = list(standing.engines(processes, age))
    said = list(
        chain(
            standing.by_itself(processes, over=not going_on and standing_s is None and took is not None),
            standing.held_up(processes, (at - since) / 1e9),
            in_collectives,
            engines,
            waiting_spans.samples(run, spans, min(age, (at - since) / 1e9)),
            waiting_spans.stages(spans, labels) if not stuck else (),
            standing.stacks(rest),
        )
    )
    said = said or list(standing.busy(processes)) or list(standing.waiting(processes)) or list(_innermost(spans))
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
    said = [*waiting_spans.samples(run, spans, age if still else None), *waiting_spans.stages(spans, {})]
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
