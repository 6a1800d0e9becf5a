"""Data of several runs beside each other: step time, stages, tokens, and what differs in their versions and commands.

A run with several loops has a row for each loop.

Only the overview of each run is read, and no trace. So a folder of hundreds of runs takes seconds.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median

import msgspec

from autoprof.base.redact import writable
from autoprof.report.build import tokens_per_s, versions_of
from autoprof.report.model import OWN, SCHEMA
from autoprof.report.overview import Overview, Recorded, basis, own_seconds, shares, typical_steps
from autoprof.report.timeline import RunTimeline, journals_of
from autoprof.rundir.runs import Run, Step
from autoprof.traces.clocks import loop_title, programs_of, steps_by_loop


class RunRow(msgspec.Struct, frozen=True, kw_only=True):
    """The data that a report on several runs shows for one of them, or for one of its loops."""

    id: str
    path: str
    state: str
    started_ns: int | None  # The start of the run, in ns since the epoch.
    command: str
    steps: int  # The number of steps that have ended.
    basis: str  # A text that names the steps from which the data was computed. Empty if no step has ended.
    median_s: float | None  # The median of the seconds of these steps.
    tokens_per_s: float | None  # Generated tokens of these steps, divided by their seconds. None if unknown.
    # The mean of the seconds of each stage in these steps: the longest stage first, then `other`. Without autoprof's
    # own time.
    stages: dict[str, float]
    kinds: dict[str, str]  # The kinds of the stages, by the name of the stage. Stages without a kind are left out.
    versions: dict[str, str]  # The versions that are not the same in all runs, by name.
    words: list[str]  # The words of the command that at least one other run lacks.
    loop: int = 0  # The number of the loop, from 1. 0 if the run has one loop.
    trainer: str = ""  # The class of the loop's trainer; empty if unknown.

    @property
    def label(self) -> str:
        """Return the id of the run, and the title of the loop if the run has several loops."""
        return f"{self.id}, {loop_title(self.loop, self.trainer)}" if self.loop else self.id


class RunTable(msgspec.Struct, frozen=True, kw_only=True):
    """The output of `autoprof report --json` for several runs."""

    runs: list[RunRow]  # The runs, oldest first. A run with several loops has a row for each of them.
    stages: list[str]  # The names of the stages of all runs, the longest first, then `other`.
    versions: list[str]  # The names of the versions that are not the same in all runs.
    schema: int = SCHEMA

    @property
    def count(self) -> int:
        """Return the number of the runs."""
        return len({row.path for row in self.runs})


def table(runs: Sequence[Run], progress: Callable[[int, int | None, str], object]) -> RunTable:
    """Return the data of several runs.

    Args:
        runs: The runs, in any order. A run that is listed twice counts once.
        progress: Function that is called before each run is read, with the number of runs that were read, the number of
            all runs, and the id of the run.
    """
    distinct = {run.path: run for run in runs}
    rows = []
    for number, run in enumerate(distinct.values()):
        progress(number, len(distinct), run.id)
        rows += _rows(run)
    rows = _with_differences(sorted(rows, key=lambda row: (row.started_ns or 0, row.id)))
    sums: dict[str, float] = {}
    for row in rows:
        for name, took in row.stages.items():
            sums[name] = max(sums.get(name, 0.0), took)
    ordered_stages = sorted(sums, key=lambda name: (name == "other", -sums[name]))
    versions = sorted({name for row in rows for name in row.versions})
    return RunTable(runs=rows, stages=ordered_stages, versions=versions)


def _rows(run: Run) -> list[RunRow]:
    """Return the rows of a run's loops, with all versions of the run and all words of its command."""
    path = Path(run.path)
    files, _ = journals_of(path)
    timeline = RunTimeline(files, path, programs_of(run, files))
    steps = steps_by_loop(run.steps, timeline.attempts)
    loops = timeline.attempts.loops
    if len(loops) < 2:
        return [_row(run, timeline, steps)]
    rows = []
    for number in sorted(loops):
        row = _row(run, timeline.of_loop(number), [step for step in steps if step.loop == number])
        rows.append(msgspec.structs.replace(row, loop=number, trainer=writable(loops[number].trainer)))
    return rows


def _row(run: Run, timeline: RunTimeline, steps: Sequence[Step]) -> RunRow:
    """Return the row of a run with one loop, or of the loop to which the timeline and the captured steps belong."""
    recorded = Recorded(steps, {file.host: file.shift_ns for file in timeline.journals})
    overview = Overview(timeline, {step.number: step for step in steps}, recorded)
    typical_rows = typical_steps(overview.rows)
    stages = [stage for stage in shares(overview.rows) if stage.name != OWN]
    return RunRow(
        id=writable(run.id),
        path=writable(run.path),
        state=run.outcome,
        started_ns=round(run.info.started * 1e9) or None,
        command=run.info.command,
        steps=len(overview.rows),
        basis=basis(overview.rows) if overview.rows else "",
        median_s=median(map(own_seconds, typical_rows)) if typical_rows else None,
        tokens_per_s=tokens_per_s(typical_rows),
        stages={stage.name: stage.seconds / len(typical_rows) for stage in stages},
        kinds={stage.name: stage.kind for stage in stages if stage.kind},
        versions=versions_of(run),
        words=_words(run.info.command),
    )


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:  # a quote is not closed
        return command.split()


def _with_differences(rows: Sequence[RunRow]) -> list[RunRow]:
    """Return the rows with only those versions and words that are not the same in all of them."""
    common_words = _common(row.words for row in rows)
    common_versions = _common(row.versions.items() for row in rows)
    return [
        msgspec.structs.replace(
            row,
            words=[word for word in row.words if word not in common_words],
            versions={
                name: version for name, version in row.versions.items() if (name, version) not in common_versions
            },
        )
        for row in rows
    ]


def _common(groups: Iterable[Iterable[object]]) -> set[object]:
    sets = [set(group) for group in groups]
    return set.intersection(*sets) if sets else set()
