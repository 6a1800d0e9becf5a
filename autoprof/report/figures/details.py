"""Figures of the chosen steps: a second reading of the timeline keeps all that belongs to them."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence

from autoprof.report.figures import words
from autoprof.report.figures.captures import windows
from autoprof.report.figures.index import StepSpan
from autoprof.report.figures.lanes import Lanes
from autoprof.report.figures.overview import WHOLE, Recorded, typical_steps
from autoprof.report.figures.reading import Reader, Timeline
from autoprof.report.figures.samples import INSIDE, Samples
from autoprof.report.figures.skews import skews
from autoprof.report.figures.zones import Zone, parts
from autoprof.report.model import CaptureFigures, StepFigures, StepRow
from autoprof.rundir.records import PROCESS, Line
from autoprof.traces.clocks import is_of

# Where no step was chosen: so many slow ones, and so many of the captured ones, the last. What held them up is looked
# for in so many more slow ones.
_MOST_SLOW, _MOST_CAPTURED, _MOST_LOOKED_AT = 4, 4, 12
# More gaps than this nobody reads.
_MOST_GAPS = 100


def choose(rows: Sequence[StepRow], cut_off: Iterable[StepRow] = ()) -> list[int]:
    """Choose the steps that a report shows if none was asked for: slow, captured, else a typical one.

    Args:
        rows: The steps that have ended.
        cut_off: Those that have not, which are shown where they were captured.
    """
    captured = sorted(row.number for row in (*rows, *cut_off) if row.captured)[-_MOST_CAPTURED:]
    found = {*_slowest(rows)[:_MOST_SLOW], *captured}
    if not found and rows:
        likely = sorted(typical_steps(rows), key=lambda row: row.seconds)
        found = {likely[len(likely) // 2].number}
    return sorted(found)


def looked_at(rows: Sequence[StepRow], shown: Collection[int]) -> list[int]:
    """Return slow steps that are not shown but may have findings, the slowest first."""
    return [number for number in _slowest(rows) if number not in shown][:_MOST_LOOKED_AT]


def _slowest(rows: Sequence[StepRow]) -> list[int]:
    return [row.number for row in sorted(rows, key=lambda row: row.usual_s - row.seconds) if row.slow]


class _Step:
    """Data of one step while the timeline is read."""

    def __init__(self, span: StepSpan, timelines: Sequence[Timeline]) -> None:
        self.span = span
        self.lanes = Lanes(timelines, span.file, span.start_ns, span.end_ns)
        self.samples = Samples()

    def add(self, file: int, line: Line) -> None:
        own = line.step == self.span.number and is_of(line, self.span.since_ns, self.span.until_ns)
        goes_on = line.start_ns < self.span.end_ns and line.end_ns > self.span.start_ns
        if not own and not goes_on:
            return
        if line.kind in (PROCESS, "step") or (line.kind == "timer" and (line.name == WHOLE or file != self.span.file)):
            return
        self.lanes.add(file, line, own or line.step is None)
        if own and (line.kind == "sample" or line.kind in INSIDE):
            self.samples.add(file, line)


def details(
    spans: Sequence[StepSpan],
    rows: Mapping[int, StepRow],
    timelines: Sequence[Timeline],
    captures: Mapping[int, list[CaptureFigures]],
    recorded: Recorded,
    zones: Sequence[Sequence[Zone]],
) -> list[StepFigures]:
    """Make the figures of some steps.

    Args:
        spans: The steps.
        rows: Their rows in the overview, by number.
        timelines: All timeline files of the run, in the order of the overview.
        captures: The captures of each step.
        recorded: When something was recorded.
        zones: Those of each file. What is written by now in the last one of a file is read, too.
    """
    steps = [_Step(span, timelines) for span in spans]
    # The overview has counted what is left out.
    reader = Reader()
    of = [(span.number, span.start_ns, span.end_ns) for span in spans]
    for number, timeline in enumerate(timelines):
        for line in reader.spans(timeline, parts=parts(zones[number], of, sys.maxsize)):
            for step in steps:
                step.add(number, line)
    found = []
    for step in steps:
        found.append(_figures(step, rows[step.span.number], timelines, captures.get(step.span.number, []), recorded))
    return found


def _figures(
    step: _Step,
    row: StepRow,
    timelines: Sequence[Timeline],
    captures: list[CaptureFigures],
    recorded: Recorded,
) -> StepFigures:
    span = step.span
    lanes = step.lanes.finish()
    labels = [""] * len(timelines)
    for lane in lanes:
        if lane.role == "agent_loop" or not labels[lane.file]:
            labels[lane.file] = lane.label
    gaps = step.lanes.gaps(lanes)
    shown = sorted(sorted(gaps, key=lambda gap: gap.start_s - gap.end_s)[:_MOST_GAPS], key=lambda gap: gap.start_s)
    return StepFigures(
        number=span.number,
        start_ns=span.start_ns,
        seconds=row.seconds,
        stages=row.stages,
        kinds=row.kinds,
        lanes=[lane.row(timelines[lane.file], span.start_ns, span.end_ns) for lane in lanes],
        gaps=shown,
        gaps_left_out=len(gaps) - len(shown),
        samples=step.samples.figures(span.start_ns, labels, [timeline.name for timeline in timelines]),
        skews=skews(lanes, timelines, recorded),
        weight_sync_s=words.seconds_of(row.stages, words.SYNC, row.kinds),
        path=step.lanes.path(lanes),
        captures=captures,
        findings=[],
        captured_for=windows(captures),
        kind=row.kind,
        no_stage=row.no_stage,
    )
