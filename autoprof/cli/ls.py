"""`autoprof ls`: lists runs, or the captures of one run."""

from __future__ import annotations

import argparse
import time

import msgspec

from autoprof.base import units
from autoprof.cli import arguments, console
from autoprof.cli.documents import Listed, ListedRun, ListedSpan
from autoprof.rundir import processes, runs
from autoprof.rundir.records import OpenSpan
from autoprof.rundir.runs import CaptureFile, loop_of

# Maximum number of runs, the latest ones, that are checked for dead processes. The check reads the timelines of the
# runs, which takes time.
_MAX_DEATH_CHECKS = 10
# Maximum number of captures that are listed one by one. If there are more, several captures share a row.
_MAX_LISTED = 200
# Maximum number of processes of a running run whose open spans are read. They are the processes that wrote last.
_MAX_PROCESSES = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    text = "a run: its folder, its id, the beginning of its id, or latest"
    parser.add_argument("name", nargs="?", metavar="RUN", help=text)
    arguments.add_dir(parser)
    arguments.add_json(parser)


def run(parsed: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    if parsed.name:
        return _show([arguments.find_run(parsed)], parsed.json, captures=True)
    parent = arguments.parent(parsed)
    listed_runs = runs.runs(parent)
    if not listed_runs:
        raise runs.NotFound(f"there are no runs in {parent}; {runs.NONE_LEFT}")
    return _show(listed_runs, parsed.json, captures=False)


def _state(capture: CaptureFile) -> str:
    """Return the state of a capture. If the capture was not meant to have a trace, add the reason."""
    return f"{capture.state}, {capture.meta.reason}" if capture.untraced else capture.state


def _show(listed_runs: list[runs.Run], as_json: bool, captures: bool) -> int:
    if as_json:
        documents = [
            run.described() | {"state": run.outcome, "bytes": run.bytes, "open": msgspec.to_builtins(_open_spans(run))}
            for run in listed_runs
        ]
        console.print_json(Listed(runs=msgspec.convert(documents, list[ListedRun])))
        return 0
    rows = [
        [
            run.id,
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.info.started)),
            ", ".join([run.outcome, *_open_texts(run)]),
            _step_numbers(run),
            str(len(run.captures)),
            units.size(run.bytes),
        ]
        for run in listed_runs
    ]
    drop = ("started", "size", "captures", "steps")
    console.show(["run", "started", "state", "steps", "captures", "size"], rows, drop)
    for run in listed_runs:
        if run.info.no_hooks:
            console.complain(f"ls: {run.id} has no profile, because no hook was applied: {run.info.no_hooks}", 0)
    for run in listed_runs[-_MAX_DEATH_CHECKS:]:
        if not run.state.startswith(runs.ENDED):
            from autoprof.report import causes  # most runs ended well

            if cause := causes.first_sentence(run):
                console.complain(f"ls: {run.id}: {cause}", 0)
    if captures:
        print()
        console.show(["step", "capture", "state", "size"], _capture_rows(listed_runs[0]), drop=("size", "step"))
        for line in [line for run in listed_runs for line in run.left_out]:
            console.complain(f"ls: {line}", 0)
        listed_runs[0].keep_captures()
    return 0


def _step_numbers(run: runs.Run) -> str:
    """Return the numbers of the captured steps, for each loop of the run."""
    loops: dict[int, list[int]] = {}
    for step in run.steps:
        loops.setdefault(step.loop, []).append(step.number)
    texts = {loop: units.ranges(numbers) for loop, numbers in loops.items()}
    return "; ".join(text if loop == 1 else f"loop {loop}: {text}" for loop, text in texts.items())


def _capture_rows(run: runs.Run) -> list[list[str]]:
    """Return the rows of the table of captures.

    Each capture has a row. If there are many captures, those with the same step, stage and state share a row.
    """
    captures = [(step.label, capture) for step in run.steps for capture in [*step.captures, *step.merged]]
    if len(captures) <= _MAX_LISTED:
        return [[step, capture.name, _state(capture), units.size(capture.bytes)] for step, capture in captures]
    groups: dict[tuple[str, str, str], list[int]] = {}
    for step, capture in captures:
        stage = ".".join(capture.name.split(".")[:2])
        groups.setdefault((step, stage, _state(capture)), []).append(capture.bytes)
    return [
        [step, f"{stage}: {units.count(len(sizes), 'capture')}", state, units.size(sum(sizes))]
        for (step, stage, state), sizes in groups.items()
    ]


def _open_spans(run: runs.Run) -> list[ListedSpan]:
    """Return the open step of a running run, and the stage that began last in this step.

    Return an empty list if the run is not running.
    """
    if not run.state.startswith("running"):
        return []
    now = time.time_ns()
    states = processes.read(run.path, most=_MAX_PROCESSES)
    spans = [
        span for state in states if state.state in (processes.RUNNING, processes.ELSEWHERE) for span in state.spans
    ]
    latest_spans: list[OpenSpan] = []
    for kind in ("step", "stage"):
        candidates = [
            span
            for span in spans
            if span.kind == kind and (not latest_spans or span.step in (None, latest_spans[0].step))
        ]
        latest_spans += sorted(candidates, key=lambda span: span.start_ns)[-1:]
    loop = max(map(loop_of, latest_spans), default=1)
    return [ListedSpan(span.name, span.step, max(0.0, (now - span.start_ns) / 1e9), loop) for span in latest_spans]


def _open_texts(run: runs.Run) -> list[str]:
    """Return a text for the open step of a running run, and one for the open stage, such as `step 4 for 12 s`."""
    spans = _open_spans(run)
    step = next((f" {runs.label(span.step, span.loop)}" for span in spans if span.step is not None), "")
    names = [f"step{step}" if span.name == "step" else span.name for span in spans]
    return [f"{name} for {units.seconds(span.age_s)}" for name, span in zip(names, spans, strict=True)]
