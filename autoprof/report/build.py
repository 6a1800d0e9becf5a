"""Data of a report on a run or on one of its steps, and on the comparison with another run or step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from statistics import median

import msgspec

from autoprof import __version__
from autoprof.base import units
from autoprof.base.identity import HOST, pid_namespace
from autoprof.base.redact import writable
from autoprof.base.units import ranges, seconds
from autoprof.report import causes, findings, gap_places, hang_state, hangs, model, remedies
from autoprof.report.details import capture_figures, choose, choose_captures, details, more_to_judge, warm_ups
from autoprof.report.model import CaptureFigures, Finding, RunFigures, StepFigures, StepRow
from autoprof.report.overview import (
    CAPTURED,
    LEAST_S,
    Overview,
    Recorded,
    basis,
    own_seconds,
    shares,
    shares_of_kinds,
    typical_steps,
    validations,
    without_autoprof,
)
from autoprof.report.timeline import NO_FILE, RunTimeline, StepSpan, journals_of
from autoprof.rundir import deaths, layout, runs
from autoprof.rundir.file_names import REPORT, tidy
from autoprof.rundir.journal import EVER
from autoprof.rundir.processes import RUNNING
from autoprof.rundir.records import LOST_LINES
from autoprof.rundir.runs import Run, Step
from autoprof.traces.clocks import programs_of, steps_by_loop
from autoprof.traces.timeline import attempts_of

# Function that is called before the timeline and before each trace is read. Its arguments are the number of traces that
# were read, the number of all traces (None before the timeline), and the name of the file to read.
Progress = Callable[[int, int | None, str], object]
# Maximum number of rows in the tables of operators and kernels.
MAX_OPERATORS = 50
# Maximum number of notes on steps that recording made slower, and on steps in which autoprof's own time was long.
_MAX_RECORDED_NOTES = 4


def unseen(done: int, total: int | None, name: str) -> None:
    """Show no progress."""


def figures(
    run: runs.Run,
    chosen: Sequence[int] = (),
    progress: Progress = unseen,
    operators: int = MAX_OPERATORS,
    loop: int | None = None,
) -> RunFigures:
    """Return the data of the report on a run. If cached data is current, use the cached data.

    Args:
        run: The run that the report shows.
        chosen: The numbers of the steps to show in detail. If empty, the steps that `details.choose` picks.
        progress: Function that is called before the timeline and before each trace is read.
        operators: The maximum number of operators, and of kernels, to keep of each trace.
        loop: The number of the loop to show. If None, all loops of the run.

    Raises:
        NotFound: A chosen step is neither in the timeline nor among the captures, several loops have the step, or the
            loop does not exist.
    """
    progress(0, None, "the timeline")
    # A large run that has ended does not change. So its data is cached, and the next report reads only the steps whose
    # details the cache lacks.
    key, whole = _cached(run, operators, loop)
    reading = None
    if whole is None or (chosen and whole.figures.loops):
        timeline, clocks = _timeline_of(run)
        shown_loop = _chosen_loop(run, timeline, loop, chosen)
        if shown_loop is None:
            whole = _whole_of_loops(run, timeline, clocks, progress, operators)
        elif chosen and loop is None and len(timeline.attempts.loops) > 1:
            return figures(run, chosen, progress, operators, shown_loop)
        else:
            reading = _Reading(run, timeline, clocks, shown_loop, progress, operators)
            reading.check(chosen)
            whole = reading.whole()
        _put_cached(run, key, whole)
    if not chosen:
        return whole.figures
    steps = {step.number: step for step in whole.figures.details}
    if more_numbers := [number for number in dict.fromkeys(chosen) if number not in steps]:
        if reading is None:
            timeline, clocks = _timeline_of(run)
            reading = _Reading(run, timeline, clocks, loop or 1, progress, operators)
        reading.check(more_numbers)
        steps |= {step.number: step for step in reading.more_steps(more_numbers, whole)}
    return msgspec.structs.replace(whole.figures, details=[steps[number] for number in dict.fromkeys(chosen)])


def _timeline_of(run: runs.Run) -> tuple[RunTimeline, list[str]]:
    """Return the timeline of a run, and notes on the clocks of its hosts."""
    files, clocks = journals_of(Path(run.path))
    return RunTimeline(files, Path(run.path), programs_of(run, files)), clocks


# Total size of a run's captures, in bytes, from which the run gets a cache. Reading such captures takes seconds.
WORTH_BYTES_OF_TRACES = 4 << 20
# Name of the part of the cache that contains the data of the report on the whole run.
_PART = "report"


class _WholeRun(msgspec.Struct, array_like=True):
    """The data of the report on a whole run or loop. It does not depend on the steps that the user chose.

    Attributes:
        figures: The data. `details` contains the steps that `details.choose` picks.
        judged: The numbers of the steps whose details the rules have judged.
        step_findings: The findings of all steps. `figures.findings` lists only the costliest steps of each kind.
        key: The key of the state that the files of the run had, if the data is cached.
    """

    figures: RunFigures
    judged: list[int] = []
    step_findings: list[Finding] = []
    key: str = ""


def _cached(run: runs.Run, operators: int, loop: int | None) -> tuple[str, _WholeRun | None]:
    """Return the key of the present state of a run and the cached data of this state, if any.

    The key is empty if the data of the run is not worth a cache, or if the run is running.
    """
    path = Path(run.path)
    stamps = {} if run.state.startswith("running") else layout.stamps_of_run(path)
    if not stamps or not (layout.is_large(stamps) or run.bytes > WORTH_BYTES_OF_TRACES):
        return "", None
    content = [sorted(stamps.items()), run.path, run.outcome, operators, loop, HOST, pid_namespace()]
    key = sha256(msgspec.msgpack.encode(content)).hexdigest()
    whole = layout.get_cached(path, _PART, _WholeRun)
    return key, whole if whole is not None and whole.key == key else None


def _put_cached(run: runs.Run, key: str, whole: _WholeRun) -> None:
    """Write the data of a run to the cache, unless the key is empty or a process of the run is still running."""
    if not key:
        return
    if all(state.state != RUNNING for state in run.processes):
        layout.put_cached(Path(run.path), _PART, msgspec.structs.replace(whole, key=key))
    run.keep_captures()


class _Reading:
    """The timeline of a run's loop, the rows of its steps, and the findings that need no details of steps."""

    def __init__(
        self, run: runs.Run, timeline: RunTimeline, clocks: list[str], loop: int, progress: Progress, operators: int
    ) -> None:
        """Args:
        run: The run.
        timeline: The timeline of the whole run.
        clocks: Notes on the clocks of the hosts.
        loop: The number of the loop.
        progress: Function that is called before each trace is read.
        operators: The maximum number of operators, and of kernels, to keep of each trace.
        """
        self._run, self._progress, self._operators = run, progress, operators
        self._files, self._clocks, self._loop = timeline.journals, clocks, loop
        self._loops = timeline.attempts.loops
        steps = steps_by_loop(run.steps, timeline.attempts)
        if len(self._loops) > 1:
            timeline = timeline.of_loop(loop)
            steps = [step for step in steps if step.loop == loop]
        # Findings on samples do not name a loop. The loop that ran last is the most likely one.
        self._is_last = loop == max(self._loops, default=loop)
        self._periods = timeline.attempts.periods(loop) if len(self._loops) > 1 else []
        self._timeline = timeline
        self._folders = {step.number: step for step in steps}
        self._shifts = {file.host: file.shift_ns for file in self._files}
        self._open_spans = hang_state.read_open_spans(run, self._shifts)
        self._recorded = Recorded(steps, self._shifts)
        overview = self._overview = Overview(self._timeline, self._folders, self._recorded)
        overview.rows = gap_places.with_places(overview.rows, overview.spans, self._timeline)
        self._rows = overview.cut_off | {row.number: row for row in overview.rows}
        self._stages = shares(overview.rows)
        self._failures = findings.failures_of_run(self._open_spans) if self._is_last else []
        on_disk = self._loops[loop].on_disk if loop in self._loops else loop
        executed_s = {(on_disk, row.number): row.seconds for row in overview.rows}
        found = hangs.hangs_of_run(run.path, self._open_spans, executed_s, self._holds)
        self._hang_findings, self._hang_notes = found
        drivers = {number: self._files[span.file].name for number, span in overview.spans.items()}
        self._row_findings = [
            *findings.findings_of_run(overview.rows, drivers),
            *findings.overall(typical_steps(overview.rows), self._stages),
        ]

    def _holds(self, at_ns: int) -> bool:
        """Return True if a time belongs to this loop."""
        return not self._periods or any(since_ns <= at_ns < until_ns for since_ns, until_ns in self._periods)

    def check(self, numbers: Iterable[int]) -> None:
        """Check that the run has the steps with these numbers.

        Raises:
            NotFound: A step is neither in the timeline nor among the captures.
        """
        for number in numbers:
            if number not in self._rows and number not in self._folders:
                raise runs.NotFound(self._no_step(number))

    def _no_step(self, number: int) -> str:
        rows = self._overview.rows
        if any(span.kind == "step" and span.step == number for _, _, span in self._open_spans.aged()):
            doctor = f"autoprof doctor {remedies.name_of(self._run.path)}"
            return f"step {number} of {self._run.id} has no end, and no stage in it has one; {doctor} shows more"
        in_timeline = ranges([row.number for row in rows]) if rows else "none"
        captured = ", ".join(map(str, self._folders)) or "none"
        place = f" in loop {self._loop}" if len(self._loops) > 1 else ""
        return (
            f"{self._run.id} has no step {number}{place}; steps in its timeline: {in_timeline}; "
            f"captured steps: {captured}"
        )

    def whole(self) -> _WholeRun:
        """Return the data of the report on the whole loop, with the findings of all steps."""
        overview, run, timeline = self._overview, self._run, self._timeline
        costliest = findings.costliest_first(self._row_findings)
        numbers = choose(overview.rows, overview.cut_off.values(), costliest) or sorted(self._folders)[-1:]
        more_numbers = more_to_judge(overview.rows, numbers)
        judged_steps = self._steps([*numbers, *more_numbers], captures_of=numbers)
        steps = judged_steps[: len(numbers)]
        hidden_warm_ups = {*warm_ups(overview.rows)}.difference(numbers)
        found = (
            finding
            for step in judged_steps
            for finding in findings.findings_of_step(step)
            if step.number not in hidden_warm_ups or finding.kind == "slow_rank"
        )
        step_findings = self._step_findings(found)
        dead = deaths.find_in_run(run)
        is_here = dead and self._holds(dead[0].last_ns or EVER - 1)
        death_findings = findings.deaths_of_run(run, dead, self._loop) if is_here else []
        typical_rows = typical_steps(overview.rows)
        open_rows, open_left_out = self._open_spans.rows()
        unread_notes = [*run.left_out, *timeline.notes()]
        figures = RunFigures(
            id=writable(run.id),
            path=writable(run.path),
            command=run.info.command,
            state=run.outcome,
            started_ns=round(run.info.started * 1e9) or None,
            hosts=list(dict.fromkeys([*run.info.hosts, *(file.host for file in self._files)])),
            versions=versions_of(run),
            steps=overview.rows,
            stages=self._stages,
            kinds=shares_of_kinds(overview.rows, self._stages),
            basis=basis(overview.rows) if overview.rows else "",
            median_s=median(map(own_seconds, typical_rows)) if typical_rows else None,
            tokens_per_s=tokens_per_s(typical_rows),
            findings=_ordered(run, death_findings, findings.abridged(step_findings)),
            details=[_with_findings(step, [*death_findings, *step_findings]) for step in steps],
            comparison=None,
            notes=[
                *run.left_out,
                *_notes(overview, timeline, self._loop, [*death_findings, *step_findings], run.info.no_hooks),
                *_notes_on_lost_lines(run),
                *self._clocks,
                *self._hang_notes,
                *timeline.notes(),
            ],
            verdict="" if step_findings or death_findings else _verdict(overview, bool(unread_notes), len(self._loops)),
            autoprof=__version__,
            open=open_rows,
            open_left_out=open_left_out,
            going_on=run.state.startswith("running"),
            validations=validations(timeline, overview.rows),
            loop=self._loop if len(self._loops) > 1 else 0,
            trainer=writable(self._loops[self._loop].trainer) if self._loop in self._loops else "",
        )
        return _WholeRun(figures, [*numbers, *more_numbers], step_findings)

    def more_steps(self, numbers: Sequence[int], whole: _WholeRun) -> list[StepFigures]:
        """Return the details of steps that `whole` does not contain, with their findings.

        If the rules have judged a step with its captures, its findings come from `whole`. Otherwise, they judge it now.
        """
        steps = []
        for step in self._steps(numbers, captures_of=numbers):
            step_findings = whole.step_findings
            if step.captures or step.number not in whole.judged:
                step_findings = self._step_findings(findings.findings_of_step(step))
            death_findings = [each for each in whole.figures.findings if each.kind == findings.DEATH]
            steps.append(_with_findings(step, [*death_findings, *step_findings]))
        return steps

    def _step_findings(self, found: Iterable[Finding]) -> list[Finding]:
        """Return `found` and the findings that need no details. Omit findings that other findings explain."""
        found = findings.with_places(found, self._failures)
        return findings.unexplained([*self._hang_findings, *found, *self._row_findings])

    def _steps(self, numbers: Sequence[int], captures_of: Sequence[int]) -> list[StepFigures]:
        """Return the details of some steps, in the order of `numbers`. Captures of the steps `captures_of` are read."""
        timed = self._overview.cut_off_spans | self._overview.spans
        spans = {
            number: timed.get(number) or _span_of_captures(self._rows, self._folders[number]) for number in numbers
        }
        captured = [self._folders[number] for number in captures_of if number in self._folders]
        captures = _captures_by_step(captured, spans, self._shifts, self._progress, self._operators)
        unread = {number: len(self._folders[number].captures) - len(read) for number, read in captures.items()}
        return details(list(spans.values()), self._rows, self._timeline, captures, unread, self._recorded)


def _with_findings(step: StepFigures, step_findings: Sequence[Finding]) -> StepFigures:
    found = [finding for finding in step_findings if finding.step == step.number]
    return msgspec.structs.replace(step, findings=found)


def _verdict(overview: Overview, is_incomplete: bool, loop_count: int) -> str:
    text = findings.verdict(overview.rows, is_incomplete)
    return text.replace("this run", "this loop") if loop_count > 1 else text


# Maximum number of loops that a report shows: the last loops of the run.
_MAX_LOOPS = 10


def _chosen_loop(run: runs.Run, timeline: RunTimeline, loop: int | None, chosen: Sequence[int]) -> int | None:
    """Return the number of the loop to show. Return None if the report shows several loops.

    Raises:
        NotFound: The loop does not exist, or several loops have a chosen step.
    """
    loops = timeline.attempts.loops
    names = timeline.attempts.titles
    if loop is not None and loop not in (loops or {1}):
        raise runs.NotFound(f"{run.id} has no loop {loop}; its loops: {model.listed(names.values()) or 'loop 1'}")
    if loop is not None or len(loops) < 2:
        return loop or 1
    if not chosen:
        return None
    steps_of = {number: timeline.of_loop(number).steps for number in loops}
    for step in chosen:
        if not any(step in steps for steps in steps_of.values()):
            raise runs.NotFound(f"{run.id} has no step {step}; its loops: {model.listed(names.values())}")
    having = [number for number, steps in steps_of.items() if all(step in steps for step in chosen)]
    if len(having) == 1:
        return having[0]
    steps = f"{model.plural(chosen, 'step', 'steps')} {model.listed(map(str, chosen))}"
    if not having:
        raise runs.NotFound(f"{run.id} has no loop with {steps}; its loops: {model.listed(names.values())}")
    listed_loops = " and ".join(names[number] for number in having)
    raise runs.NotFound(f"{run.id} has {steps} in {listed_loops}; choose with --loop")


def _whole_of_loops(
    run: runs.Run, timeline: RunTimeline, clocks: list[str], progress: Progress, operators: int
) -> _WholeRun:
    """Return the data of a run with several loops."""
    numbers = sorted(timeline.attempts.loops)
    shown = [
        _Reading(run, timeline, clocks, number, progress, operators).whole().figures for number in numbers[-_MAX_LOOPS:]
    ]
    run_notes = [*run.left_out, *_notes_on_lost_lines(run), *clocks, *timeline.notes()]
    parts = [
        msgspec.structs.replace(part, notes=[note for note in part.notes if note not in run_notes], open=[])
        for part in shown
    ]
    if len(numbers) > len(parts):
        run_notes.insert(0, f"the last {len(parts)} of {len(numbers)} loops are shown; --loop N shows an earlier one")
    figures = msgspec.structs.replace(
        shown[-1],
        steps=[],
        stages=[],
        kinds=[],
        basis="",
        median_s=None,
        tokens_per_s=None,
        findings=findings.findings_of_loops(parts),
        details=[],
        notes=run_notes,
        verdict="",
        validations=[],
        loop=0,
        trainer="",
        loops=parts,
    )
    return _WholeRun(figures)


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
    folders: Sequence[Step],
    spans: Mapping[int, StepSpan],
    shifts: Mapping[str, int],
    progress: Progress,
    operators: int,
) -> dict[int, list[CaptureFigures]]:
    """Read the traces of the chosen captures. Return the figures of the captures by the number of the step."""
    chosen_captures = [(folder, capture) for folder in folders for capture in choose_captures(folder.captures)]
    by_step: dict[int, list[CaptureFigures]] = defaultdict(list)
    for read_count, (folder, capture) in enumerate(chosen_captures):
        progress(read_count, len(chosen_captures), capture.name)
        step_start_ns = spans[folder.number].start_ns
        start_on_host_ns = step_start_ns - shifts.get(capture.meta.host, 0) if step_start_ns else None
        by_step[folder.number].append(capture_figures(folder, capture, start_on_host_ns, operators))
    return by_step


def _ordered(run: Run, death_findings: list[Finding], others: list[Finding]) -> list[Finding]:
    """Return the findings with deaths first, or second if a hang came before the deaths."""
    first = [each for each in others if each.kind == hangs.HANG][-1:]
    if death_findings and first and causes.hang_came_first(run, deaths.find_in_run(run)):
        return [*first, *death_findings, *(each for each in others if each not in first)]
    return [*death_findings, *others]


def versions_of(run: Run) -> dict[str, str]:
    """Return the versions of Python, the targets, torch and the GPU driver, by name."""
    return {name: version for name, version in ({"python": run.info.python} | run.info.versions).items() if version}


def tokens_per_s(rows: Sequence[StepRow]) -> float | None:
    """Return the response tokens per second of the steps, or None if their tokens are unknown."""
    counted_steps = [(row.response_tokens, own_seconds(row)) for row in rows if row.response_tokens is not None]
    total_s = sum(took for _, took in counted_steps)
    return sum(tokens for tokens, _ in counted_steps) / total_s if total_s else None


def _notes(
    overview: Overview, timeline: RunTimeline, loop: int, step_findings: Sequence[Finding], no_hooks: str
) -> list[str]:
    notes = []
    explained_s: dict[int | None, float] = {}
    for finding in step_findings:
        explained_s[finding.step] = max(explained_s.get(finding.step, 0.0), finding.seconds)
    if (times := len(timeline.attempts.periods(loop))) > 1:
        notes.append(f"the run was started {times} times; for a step that ran again, its last run is shown")
    elif timeline.repeated:
        steps = f"{model.plural(timeline.repeated, 'step', 'steps')} {model.listed(map(str, timeline.repeated), 10)}"
        notes.append(f"{steps} ran again; the last run is shown. If they were different steps, their numbers are wrong")
    died = {finding.step for finding in step_findings if finding.kind == "death"}
    if open_ends := [number for number in overview.cut_off if number not in died]:
        subject = (
            f"step {open_ends[0]} has" if len(open_ends) == 1 else f"steps {model.listed(map(str, open_ends), 10)} have"
        )
        notes.append(f"{subject} no end in the timeline: interrupted, or still running")
    if no_hooks:
        notes.append(f"no hook was applied: {no_hooks}")
    elif not timeline.journals:
        notes.append("no timeline: the run was recorded by an autoprof without timelines, or its folder was removed")
    elif not overview.rows:
        notes.append("no step has ended in the timeline")
    notes += [
        f"step {row.number}: recorded work took {seconds(slower)} longer than usual, perhaps because of the recording: "
        f"{_main_parts_text(row.slowed)}"
        for row in overview.rows
        if (slower := sum(row.slowed.values())) >= LEAST_S and explained_s.get(row.number, 0.0) < slower / 2
    ][:_MAX_RECORDED_NOTES]
    if uncompared := [row.number for row in overview.rows if row.recorded and row.usual_s == row.seconds]:
        steps = f"{model.plural(uncompared, 'step', 'steps')} {model.listed(map(str, uncompared), 10)}"
        notes.append(f"{steps}: recorded work takes longer; too few regular steps are around to say by how much")
    notes += [
        f"step {row.number}: {_own_shares_text(shares)} was autoprof's own time, so findings don't use the seconds of "
        f"{model.plural([*shares], 'this stage', 'these stages')}"
        for row in overview.rows
        if (shares := {name: share for name, share in row.own_shares.items() if name != model.OTHER})
    ][:_MAX_RECORDED_NOTES]
    if stageless := [
        str(row.number) for row in overview.rows if not without_autoprof(row.stages).keys() - {model.OTHER}
    ]:
        notes.append(f"no stage was recorded in {model.several(len(stageless), 'step')}: {model.listed(stageless, 10)}")
    if not any(row.samples for row in overview.rows) and overview.rows:
        notes.append("no per-sample data: no `sample` hook fired")
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


def _own_shares_text(shares: Mapping[str, float]) -> str:
    """List the stages with the largest shares of autoprof's own time, such as `81 % of gen, 40 % of ref`."""
    by_share = sorted(shares.items(), key=lambda each: -each[1])
    return model.listed([f"{units.share(share)} of {name}" for name, share in by_share], 3)


class ReportRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The run or step that a report shows, and the run or step with which the report compares it.

    Attributes:
        run: The run that the report shows.
        loop: The loop that the report shows, and compares with the same loop of `against`. None for all loops.
        step: The only step to show in detail. If None, the report shows the steps that `details.choose` picks.
        against: The run to compare with. None for a report without a comparison.
        against_step: If `step` is set, the step of `against` to compare with. If None, the step with the number `step`.
    """

    run: Run
    loop: int | None = None
    step: int | None = None
    against: Run | None = None
    against_step: int | None = None

    @property
    def page(self) -> Path:
        """Return the path of the page.

        Only the page of a whole run without a comparison is named `REPORT`. `autoprof open` shows this page.
        """
        name_parts = [] if self.loop is None else [f"loop{self.loop}"]
        name_parts += [] if self.step is None else [f"step{self.step}"]
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
        chosen = [] if own_step is None else [own_step]
        return remedies.with_remedies(figures(run, chosen, progress, loop=request.loop), run)
    from autoprof.report import comparison  # most reports need no comparison

    other_step = own_step if request.against_step is None else request.against_step
    own_steps, other_steps = ([] if step is None else [step] for step in (own_step, other_step))
    is_same_run = bool(own_steps) and request.against.path == run.path
    shown_steps = own_steps + other_steps if is_same_run else own_steps
    own_figures = other_figures = figures(run, shown_steps, progress, comparison.MAX_OPERATORS, request.loop)
    if not is_same_run:
        # A run with one loop is compared with any loop.
        other_loop = request.loop if len(attempts_of(request.against).loops) > 1 else None
        other_figures = figures(request.against, other_steps, progress, comparison.MAX_OPERATORS, other_loop)
    for each in (own_figures, other_figures):
        if each.loops:
            titles = model.listed(part.title for part in each.loops)
            raise runs.NotFound(f"{each.id} has several loops: {titles}; choose with --loop the loop to compare")
    sides = [(other_figures, other_step), (own_figures, own_step)]
    compared = comparison.compare(*(comparison.side(each, step, not is_same_run) for each, step in sides))
    compared_figures = msgspec.structs.replace(trimmed(own_figures), comparison=compared)
    return remedies.with_remedies(compared_figures, run)
