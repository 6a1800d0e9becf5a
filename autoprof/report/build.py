"""Figures of a report: of a run or one step of it, and a comparison with another."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

import msgspec

from autoprof import __version__
from autoprof.base.redact import writable
from autoprof.base.units import seconds
from autoprof.report import comparison
from autoprof.report.figures import captures, words
from autoprof.report.figures.details import choose, details, looked_at
from autoprof.report.figures.index import StepSpan
from autoprof.report.figures.overview import (
    CAPTURED,
    NOBODY,
    Overview,
    Recorded,
    basis,
    shares,
    shares_of_kinds,
    typical_steps,
    without_own,
)
from autoprof.report.figures.reading import Reader, Timeline, timelines
from autoprof.report.findings import findings
from autoprof.report.findings.registry import LEAST_S
from autoprof.report.hangs import read, sentences
from autoprof.report.model import CaptureFigures, RunFigures, StepRow
from autoprof.rundir import runs
from autoprof.rundir.file_names import REPORT, tidy
from autoprof.rundir.records import CaptureMeta
from autoprof.rundir.runs import Run, Step

# Told of the timeline and of each trace before it is read: its number, of how many, its name.
Progress = Callable[[int, int | None, str], object]
# So many operators and kernels of a trace are told.
OPERATORS = 50
# Notes on so many steps that took longer for being recorded.
_MOST_RECORDED = 4


def unseen(done: int, of: int | None, name: str) -> None:
    """Show no progress."""


def figures(
    run: runs.Run, chosen: Sequence[int] = (), progress: Progress = unseen, operators: int = OPERATORS
) -> RunFigures:
    """Make the figures of a run.

    Args:
        run: The run, as listed.
        chosen: The steps in detail; without any those that `details.choose` picks.
        progress: Told of the timeline and of each trace before it is read.
        operators: How many operators and kernels of each trace are told.

    Raises:
        NotFound: A chosen step is neither in the timeline nor among the captures.
    """
    progress(0, None, "the timeline")
    path = Path(run.path)
    going_on = run.state.startswith("running")
    files, clocks = timelines(path)
    reader = Reader()
    folders = {step.number: step for step in run.steps}
    shifts = {file.host: file.shift_ns for file in files}
    opened = read.read_open_spans(run, time.time_ns(), shifts)
    recorded = Recorded(run.steps, shifts)
    overview = Overview(files, reader, folders, recorded, path)
    rows = overview.cut_off | {row.number: row for row in overview.rows}
    asked = list(dict.fromkeys(chosen or choose(overview.rows, overview.cut_off.values())))
    asked = asked or sorted(folders)[-1:]
    for number in asked:
        if number not in rows and number not in folders:
            raise runs.NotFound(_no_step(run, number, overview.rows))
    known = overview.cut_off_spans | overview.spans
    others = [] if chosen else looked_at(overview.rows, asked)
    spans = {number: known.get(number) or _span_of_captures(rows, folders[number]) for number in (*asked, *others)}
    wanted = [folders[number] for number in asked if number in folders]
    summed = _captures(path, wanted, spans, shifts, progress, operators)
    steps = details(list(spans.values()), rows, files, summed, recorded, overview.zones)
    stages = shares(overview.rows)
    typical = typical_steps(overview.rows)
    drivers = {number: files[span.file].name for number, span in overview.spans.items()}
    died = findings.deaths_of_run(run)
    hung, hang_notes = sentences.hangs_of_run(run.path, opened, {row.number: row.seconds for row in overview.rows})
    everything = findings.settled(
        [
            *hung,
            *findings.with_places(
                (found for step in steps for found in findings.of_step(step)), findings.failures_of_run(opened)
            ),
            *findings.of_run(overview.rows, drivers),
            *findings.overall(typical, stages),
        ]
    )
    shown = [
        msgspec.structs.replace(step, findings=[each for each in everything if each.step == step.number])
        for step in steps
        if step.number in asked
    ]
    rows_open, more_open = opened.rows()
    unread = [*run.left_out, *reader.notes()]
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
        median_s=median(row.seconds for row in typical) if typical else None,
        tokens_per_s=_rate(typical),
        findings=[*died, *findings.abridged(everything)],
        details=shown,
        comparison=None,
        notes=[*run.left_out, *_notes(overview, files), *clocks, *hang_notes, *reader.notes()],
        verdict="" if everything or died else findings.verdict(overview.rows, bool(unread)),
        autoprof=__version__,
        open=rows_open,
        open_left_out=more_open,
        going_on=going_on,
    )


def trimmed(figures: RunFigures) -> RunFigures:
    """Return the figures with no more operators of a trace than are told."""
    return msgspec.structs.replace(
        figures,
        details=[
            msgspec.structs.replace(
                step,
                captures=[
                    msgspec.structs.replace(
                        capture, operators=capture.operators[:OPERATORS], kernels=capture.kernels[:OPERATORS]
                    )
                    for capture in step.captures
                ],
            )
            for step in figures.details
        ],
    )


def _span_of_captures(rows: dict[int, StepRow], folder: Step) -> StepSpan:
    """Return a span for a step that only has captures, as long as these, and add its row."""
    clocks = [clock for capture in folder.captures if (clock := _clock(capture.meta))]
    start = min((start for start, _ in clocks), default=0)
    end = max((end for _, end in clocks), default=0)
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
    return StepSpan(folder.number, NOBODY, start, end, "", None, None)


def _captures(
    path: Path,
    folders: Sequence[Step],
    spans: Mapping[int, StepSpan],
    shifts: Mapping[str, int],
    progress: Progress,
    operators: int,
) -> dict[int, list[CaptureFigures]]:
    whole = sum(len(folder.captures) for folder in folders)
    done = 0
    found: dict[int, list[CaptureFigures]] = {}
    for folder in folders:
        zero = spans[folder.number].start_ns
        for capture in folder.captures:
            progress(done, whole, capture.name)
            done += 1
            own = zero - shifts.get(capture.meta.host, 0) if zero else None
            summed = captures.figures(path, folder.number, capture, own, operators)
            found.setdefault(folder.number, []).append(summed)
    return found


def _clock(meta: CaptureMeta) -> tuple[int, int] | None:
    start, stop = meta.clock.start.unix_ns, meta.clock.stop.unix_ns
    return (start, stop) if 0 < start <= stop else None


def _rate(rows: Sequence[StepRow]) -> float | None:
    known = [(row.response_tokens, row.seconds) for row in rows if row.response_tokens is not None]
    whole = sum(took for _, took in known)
    return sum(tokens for tokens, _ in known) / whole if whole else None


def _notes(overview: Overview, files: Sequence[Timeline]) -> list[str]:
    notes = []
    if overview.attempts > 1:
        notes.append(f"the run was begun {overview.attempts} times; a step that ran again is told as it ran last")
    if open_ends := list(overview.cut_off):
        said = (
            f"step {open_ends[0]} has" if len(open_ends) == 1 else f"steps {words.listed(map(str, open_ends), 10)} have"
        )
        notes.append(f"{said} no end in the timeline: cut off, or going on")
    if not files:
        notes.append("there is no timeline: the run was made by an autoprof without one, or its folder was removed")
    elif not overview.rows:
        notes.append("no step has ended in the timeline")
    notes += [
        f"step {row.number}: recorded work took {seconds(slower)} longer than usual, which recording may explain: "
        f"{_parts(row.slowed)}"
        for row in overview.rows
        if (slower := sum(row.slowed.values())) >= LEAST_S
    ][:_MOST_RECORDED]
    if stageless := [str(row.number) for row in overview.rows if not without_own(row.stages).keys() - {words.OTHER}]:
        notes.append(f"no stage was recorded in {words.several(len(stageless), 'step')}: {words.listed(stageless, 10)}")
    if not any(row.samples for row in overview.rows) and overview.rows:
        notes.append("there are no spans of samples: no hook tells of them in this trainer")
    return notes


def _parts(stages: Mapping[str, float]) -> str:
    longest = sorted(stages.items(), key=lambda each: -each[1])
    most = [f"{name} {seconds(took)}" for name, took in longest if took >= 0.1 * longest[0][1]]
    return words.listed(most, 3)


def _no_step(run: runs.Run, number: int, rows: Sequence[StepRow]) -> str:
    there = f"{rows[0].number} to {rows[-1].number}" if rows else "none"
    captured = ", ".join(str(step.number) for step in run.steps) or "none"
    return f"{run.id} has no step {number}; in its timeline are {there}, captured are {captured}"


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A run or one step of it, and what to hold it against.

    Attributes:
        run: The run.
        step: The only step in detail; without it those that are worth it.
        against: What to hold it against: a run, or a step of one.
        against_step: The step of `against`, only together with `step`, which it is by default.
    """

    run: Run
    step: int | None = None
    against: Run | None = None
    against_step: int | None = None

    @property
    def page(self) -> Path:
        """Return the path of its page. Only that of the whole run, which `autoprof open` shows, is called `REPORT`."""
        words = [] if self.step is None else [f"step{self.step}"]
        if self.against is not None:
            words += ["against", tidy(self.against.id)]
            words += [] if self.against_step is None else [f"step{self.against_step}"]
        stem, ending = REPORT.split(".")
        return Path(self.run.path, ".".join([stem, *words, ending]))


def report_figures(request: Request, progress: Progress = unseen) -> RunFigures:
    """Make the figures that a report shows.

    Raises:
        NotFound: There is no such step.
    """
    own_step, run = request.step, request.run
    if request.against is None:
        return figures(run, [] if own_step is None else [own_step], progress)
    other_step = own_step if request.against_step is None else request.against_step
    own_steps, other_steps = ([] if step is None else [step] for step in (own_step, other_step))
    one_run = bool(own_steps) and request.against.path == run.path
    if one_run:
        own = others = figures(run, own_steps + other_steps, progress, comparison.OPERATORS)
    else:
        own = figures(run, own_steps, progress, comparison.OPERATORS)
        others = figures(request.against, other_steps, progress, comparison.OPERATORS)
    before, after = comparison.side(others, other_step, not one_run), comparison.side(own, own_step, not one_run)
    return msgspec.structs.replace(trimmed(own), comparison=comparison.compare(before, after))
