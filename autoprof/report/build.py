"""Data of a report on a run or on one of its steps, and on the comparison with another run or step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from statistics import median

import msgspec

from autoprof import __version__
from autoprof.base.identity import HOST, pid_namespace
from autoprof.base.redact import writable
from autoprof.base.units import ranges, seconds
from autoprof.report import findings, hang_state, hangs, model
from autoprof.report.details import capture_figures, choose, choose_captures, details, more_slow_steps
from autoprof.report.model import CaptureFigures, RunFigures, StepRow
from autoprof.report.overview import (
    CAPTURED,
    Overview,
    Recorded,
    basis,
    shares,
    shares_of_kinds,
    typical_steps,
    without_autoprof,
)
from autoprof.report.rules import LEAST_S
from autoprof.report.timeline import NO_FILE, RunTimeline, StepSpan, journals_of
from autoprof.rundir import layout, runs
from autoprof.rundir.file_names import REPORT, tidy
from autoprof.rundir.processes import RUNNING
from autoprof.rundir.records import LOST_LINES
from autoprof.rundir.runs import Run, Step

# Function that is called before the timeline and before each trace is read. Its arguments are the number of traces that
# were read, the number of all traces (None before the timeline), and the name of the file to read.
Progress = Callable[[int, int | None, str], object]
# Maximum number of rows in the tables of operators and kernels.
MAX_OPERATORS = 50
# Maximum number of notes on steps that recording made slower.
_MAX_RECORDED_NOTES = 4


def unseen(done: int, total: int | None, name: str) -> None:
    """Show no progress."""


def figures(
    run: runs.Run, chosen: Sequence[int] = (), progress: Progress = unseen, operators: int = MAX_OPERATORS
) -> RunFigures:
    """Return the data of the report on a run. If cached data is current, use the cached data.

    Args:
        run: The run that the report shows.
        chosen: The numbers of the steps to show in detail. If empty, the steps that `details.choose` picks.
        progress: Function that is called before the timeline and before each trace is read.
        operators: The maximum number of operators, and of kernels, to keep of each trace.

    Raises:
        NotFound: A chosen step is neither in the timeline nor among the captures.
    """
    progress(0, None, "the timeline")
    path = Path(run.path)
    # A large run that has ended does not change. So its data is cached, and the next report only writes the page.
    stamps = layout.stamps_of_run(path) if not chosen and not run.state.startswith("running") else {}
    if not layout.is_large(stamps):
        return _figures(run, chosen, progress, operators)
    content = [sorted(stamps.items()), run.path, run.outcome, operators, HOST, pid_namespace()]
    key = sha256(msgspec.msgpack.encode(content)).hexdigest()
    cached = layout.get_cached(path, _PART, _CachedFigures)
    if cached is not None and cached.key == key:
        return cached.figures
    run_figures = _figures(run, chosen, progress, operators)
    if all(state.state != RUNNING for state in run.processes):
        layout.put_cached(path, _PART, _CachedFigures(key, run_figures))
    run.keep_captures()
    return run_figures


# Name of the part of the cache that contains the data of the report on the whole run.
_PART = "report"


class _CachedFigures(msgspec.Struct, array_like=True):
    """The data of the report on a run, and the key of the state that the files of the run had."""

    key: str
    figures: RunFigures


def _figures(run: runs.Run, chosen: Sequence[int], progress: Progress, operators: int) -> RunFigures:
    path = Path(run.path)
    going_on = run.state.startswith("running")
    files, clocks = journals_of(path)
    folders = {step.number: step for step in run.steps}
    shifts = {file.host: file.shift_ns for file in files}
    open_spans = hang_state.read_open_spans(run, shifts)
    recorded = Recorded(run.steps, shifts)
    timeline = RunTimeline(files, path)
    overview = Overview(timeline, folders, recorded)
    rows = overview.cut_off | {row.number: row for row in overview.rows}
    numbers = list(dict.fromkeys(chosen or choose(overview.rows, overview.cut_off.values())))
    numbers = numbers or sorted(folders)[-1:]
    for number in numbers:
        if number not in rows and number not in folders:
            raise runs.NotFound(_no_step(run, number, overview.rows))
    timed = overview.cut_off_spans | overview.spans
    more_slow = [] if chosen else more_slow_steps(overview.rows, numbers)
    spans = {number: timed.get(number) or _span_of_captures(rows, folders[number]) for number in (*numbers, *more_slow)}
    captured = [folders[number] for number in numbers if number in folders]
    capture_figures = _captures_by_step(path, captured, spans, shifts, progress, operators)
    unread_captures = {number: len(folders[number].captures) - len(read) for number, read in capture_figures.items()}
    steps = details(list(spans.values()), rows, timeline, capture_figures, unread_captures, recorded)
    stages = shares(overview.rows)
    typical_rows = typical_steps(overview.rows)
    drivers = {number: files[span.file].name for number, span in overview.spans.items()}
    death_findings = findings.deaths_of_run(run)
    hang_findings, hang_notes = hangs.hangs_of_run(
        run.path, open_spans, {row.number: row.seconds for row in overview.rows}
    )
    step_findings = findings.unexplained(
        [
            *hang_findings,
            *findings.with_places(
                (finding for step in steps for finding in findings.findings_of_step(step)),
                findings.failures_of_run(open_spans),
            ),
            *findings.findings_of_run(overview.rows, drivers),
            *findings.overall(typical_rows, stages),
        ]
    )
    shown_steps = [
        msgspec.structs.replace(step, findings=[finding for finding in step_findings if finding.step == step.number])
        for step in steps
        if step.number in numbers
    ]
    open_rows, open_left_out = open_spans.rows()
    unread_notes = [*run.left_out, *timeline.notes()]
    return RunFigures(
        id=writable(run.id),
        path=writable(run.path),
        command=run.info.command,
        state=run.state,
        started_ns=round(run.info.started * 1e9) or None,
        hosts=list(dict.fromkeys([*run.info.hosts, *(file.host for file in files)])),
        versions={name: version for name, version in run.info.versions.items() if version},
        steps=overview.rows,
        stages=stages,
        kinds=shares_of_kinds(overview.rows, stages),
        basis=basis(overview.rows) if overview.rows else "",
        median_s=median(row.seconds for row in typical_rows) if typical_rows else None,
        tokens_per_s=_tokens_per_s(typical_rows),
        findings=[*death_findings, *findings.abridged(step_findings)],
        details=shown_steps,
        comparison=None,
        notes=[
            *run.left_out,
            *_notes(overview, timeline),
            *_notes_on_lost_lines(run),
            *clocks,
            *hang_notes,
            *timeline.notes(),
        ],
        verdict="" if step_findings or death_findings else findings.verdict(overview.rows, bool(unread_notes)),
        autoprof=__version__,
        open=open_rows,
        open_left_out=open_left_out,
        going_on=going_on,
    )


def trimmed(figures: RunFigures) -> RunFigures:
    """Return the same data with at most `MAX_OPERATORS` operators and as many kernels of each trace."""

    def with_main_operators(capture: CaptureFigures) -> CaptureFigures:
        operators, kernels = capture.operators[:MAX_OPERATORS], capture.kernels[:MAX_OPERATORS]
        return msgspec.structs.replace(capture, operators=operators, kernels=kernels)

    steps = [
        msgspec.structs.replace(step, captures=[*map(with_main_operators, step.captures)]) for step in figures.details
    ]
    return msgspec.structs.replace(figures, details=steps)


def _span_of_captures(rows: dict[int, StepRow], folder: Step) -> StepSpan:
    """Return a span for a step that is not in the timeline, and add a row for the step to `rows`.

    The span reaches from the first start to the last end of the step's captures.

    Args:
        rows: The rows of the steps, by number.
        folder: The captures of the step.
    """
    all_clocks = [(capture.meta.clock.start.unix_ns, capture.meta.clock.stop.unix_ns) for capture in folder.captures]
    clocks = [(start, stop) for start, stop in all_clocks if 0 < start <= stop]
    start = min((start for start, _ in clocks), default=0)
    end = max((stop for _, stop in clocks), default=0)
    length = (end - start) / 1e9
    rows[folder.number] = StepRow(
        number=folder.number,
        start_ns=start,
        seconds=length,
        captured=True,
        slow=False,
        usual_s=length,
        stages={},
        kind=CAPTURED,
    )
    return StepSpan(folder.number, NO_FILE, start, end, "", None, None)


def _captures_by_step(
    path: Path,
    folders: Sequence[Step],
    spans: Mapping[int, StepSpan],
    shifts: Mapping[str, int],
    progress: Progress,
    operators: int,
) -> dict[int, list[CaptureFigures]]:
    """Read the traces of the chosen captures. Return the figures of the captures by the number of the step."""
    chosen_captures = {folder.number: choose_captures(folder.captures) for folder in folders}
    total = sum(map(len, chosen_captures.values()))
    read_count = 0
    by_step: dict[int, list[CaptureFigures]] = {}
    for folder in folders:
        step_start_ns = spans[folder.number].start_ns
        for capture in chosen_captures[folder.number]:
            progress(read_count, total, capture.name)
            read_count += 1
            start_on_host_ns = step_start_ns - shifts.get(capture.meta.host, 0) if step_start_ns else None
            summed = capture_figures(path, folder.number, capture, start_on_host_ns, operators)
            by_step.setdefault(folder.number, []).append(summed)
    return by_step


def _tokens_per_s(rows: Sequence[StepRow]) -> float | None:
    """Return the response tokens per second of the steps, or None if their tokens are unknown."""
    counted_steps = [(row.response_tokens, row.seconds) for row in rows if row.response_tokens is not None]
    total_s = sum(took for _, took in counted_steps)
    return sum(tokens for tokens, _ in counted_steps) / total_s if total_s else None


def _notes(overview: Overview, timeline: RunTimeline) -> list[str]:
    notes = []
    if timeline.attempts.count > 1:
        times = timeline.attempts.count
        notes.append(f"the run was started {times} times; for a step that ran again, its last run is shown")
    if open_ends := list(overview.cut_off):
        subject = (
            f"step {open_ends[0]} has" if len(open_ends) == 1 else f"steps {model.listed(map(str, open_ends), 10)} have"
        )
        notes.append(f"{subject} no end in the timeline: interrupted, or still running")
    if not timeline.journals:
        notes.append("no timeline: the run was recorded by an autoprof without timelines, or its folder was removed")
    elif not overview.rows:
        notes.append("no step has ended in the timeline")
    notes += [
        f"step {row.number}: recorded work took {seconds(slower)} longer than usual, perhaps because of the recording: "
        f"{_main_parts_text(row.slowed)}"
        for row in overview.rows
        if (slower := sum(row.slowed.values())) >= LEAST_S
    ][:_MAX_RECORDED_NOTES]
    if stageless := [
        str(row.number) for row in overview.rows if not without_autoprof(row.stages).keys() - {model.OTHER}
    ]:
        notes.append(f"no stage was recorded in {model.several(len(stageless), 'step')}: {model.listed(stageless, 10)}")
    if not any(row.samples for row in overview.rows) and overview.rows:
        notes.append("no per-sample data: the recipe has no `sample` hook, or it did not fire")
    return notes


def _notes_on_lost_lines(run: Run) -> list[str]:
    """Return a note for each process that could not write all lines of its journal."""
    errors = [(state.file, state.errors.get(LOST_LINES)) for state in run.processes]
    return [f"{name}: {error.last}" for name, error in errors if error is not None]


def _main_parts_text(stages: Mapping[str, float]) -> str:
    """List the longest stages and their seconds. Stages under a tenth of the longest one are left out."""
    by_seconds = sorted(stages.items(), key=lambda each: -each[1])
    main_parts = [f"{name} {seconds(took)}" for name, took in by_seconds if took >= 0.1 * by_seconds[0][1]]
    return model.listed(main_parts, 3)


def _no_step(run: runs.Run, number: int, rows: Sequence[StepRow]) -> str:
    in_timeline = ranges([row.number for row in rows]) if rows else "none"
    captured = ", ".join(str(step.number) for step in run.steps) or "none"
    return f"{run.id} has no step {number}; steps in its timeline: {in_timeline}; captured steps: {captured}"


class ReportRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The run or step that a report shows, and the run or step with which the report compares it.

    Attributes:
        run: The run that the report shows.
        step: The only step to show in detail. If None, the report shows the steps that `details.choose` picks.
        against: The run to compare with. None for a report without a comparison.
        against_step: If `step` is set, the step of `against` to compare with. If None, the step with the number `step`.
    """

    run: Run
    step: int | None = None
    against: Run | None = None
    against_step: int | None = None

    @property
    def page(self) -> Path:
        """Return the path of the page.

        Only the page of a whole run without a comparison is named `REPORT`. `autoprof open` shows this page.
        """
        name_parts = [] if self.step is None else [f"step{self.step}"]
        if self.against is not None:
            name_parts += ["against", tidy(self.against.id)]
            name_parts += [] if self.against_step is None else [f"step{self.against_step}"]
        stem, ending = REPORT.split(".")
        return Path(self.run.path, ".".join([stem, *name_parts, ending]))


def report_figures(request: ReportRequest, progress: Progress = unseen) -> RunFigures:
    """Return the data that a report shows.

    Raises:
        NotFound: One of the runs does not have the step to show or to compare with.
    """
    own_step, run = request.step, request.run
    if request.against is None:
        return figures(run, [] if own_step is None else [own_step], progress)
    from autoprof.report import comparison  # most reports need no comparison

    other_step = own_step if request.against_step is None else request.against_step
    own_steps, other_steps = ([] if step is None else [step] for step in (own_step, other_step))
    is_same_run = bool(own_steps) and request.against.path == run.path
    if is_same_run:
        own_figures = other_figures = figures(run, own_steps + other_steps, progress, comparison.MAX_OPERATORS)
    else:
        own_figures = figures(run, own_steps, progress, comparison.MAX_OPERATORS)
        other_figures = figures(request.against, other_steps, progress, comparison.MAX_OPERATORS)
    other_side, own_side = (
        comparison.side(other_figures, other_step, not is_same_run),
        comparison.side(own_figures, own_step, not is_same_run),
    )
    return msgspec.structs.replace(trimmed(own_figures), comparison=comparison.compare(other_side, own_side))
