"""Data of the steps that a report shows in detail. It is computed when the journals are read a second time."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from autoprof.report.figures import words
from autoprof.report.figures.captures import windows
from autoprof.report.figures.lanes import Lanes, LaneSpans, skews
from autoprof.report.figures.overview import Recorded, typical_steps
from autoprof.report.figures.samples import INSIDE, Samples
from autoprof.report.figures.timeline import WHOLE, Distinct, RunTimeline, StepSpan
from autoprof.report.model import CaptureFigures, StepFigures, StepRow
from autoprof.rundir.journal import Journal, SpanReader, ranges
from autoprof.rundir.records import Line
from autoprof.traces.clocks import is_of

# Maximum number of slow steps, and of captured steps, that are shown in detail if the user chose no steps. The captured
# steps with the highest numbers are shown.
_MAX_SLOW, _MAX_CAPTURED = 4, 4
# Maximum number of slow steps that are not shown in detail, but whose cause is searched.
_MAX_MORE_SLOW = 12
_MAX_GAPS = 100


def choose(rows: Sequence[StepRow], cut_off: Iterable[StepRow] = ()) -> list[int]:
    """Return the numbers of the steps that a report shows in detail if the user chose no steps.

    The report shows slow steps and captured steps. If a run has no such steps, the report shows one typical step.

    Args:
        rows: The steps that have ended.
        cut_off: The steps that have not ended. They are chosen only if they were captured.
    """
    captured_steps = sorted(row.number for row in (*rows, *cut_off) if row.captured)[-_MAX_CAPTURED:]
    chosen = {*_slowest(rows)[:_MAX_SLOW], *captured_steps}
    if not chosen and rows:
        typical_rows = sorted(typical_steps(rows), key=lambda row: row.seconds)
        chosen = {typical_rows[len(typical_rows) // 2].number}
    return sorted(chosen)


def more_slow_steps(rows: Sequence[StepRow], shown: Collection[int]) -> list[int]:
    """Return the numbers of slow steps that are not shown in detail, but may have findings. The slowest comes first."""
    return [number for number in _slowest(rows) if number not in shown][:_MAX_MORE_SLOW]


def _slowest(rows: Sequence[StepRow]) -> list[int]:
    return [row.number for row in sorted(rows, key=lambda row: row.usual_s - row.seconds) if row.slow]


class _StepSpans:
    """Collector of the spans of one step while the journals are read."""

    def __init__(self, span: StepSpan, journals: Sequence[Journal]) -> None:
        self.span = span
        self.lanes = Lanes(journals, span.file, span.start_ns, span.end_ns)
        self.samples = Samples()

    def add(self, file: int, line: Line) -> None:
        is_own = line.step == self.span.number and is_of(line, self.span.since_ns, self.span.until_ns)
        overlaps = line.start_ns < self.span.end_ns and line.end_ns > self.span.start_ns
        if not is_own and not overlaps:
            return
        if line.kind == "step" or (line.kind == "timer" and (line.name == WHOLE or file != self.span.file)):
            return
        self.lanes.add(file, line, is_own or line.step is None)
        if is_own and (line.kind == "sample" or line.kind in INSIDE):
            self.samples.add(file, line)


def details(
    spans: Sequence[StepSpan],
    rows: Mapping[int, StepRow],
    timeline: RunTimeline,
    captures: Mapping[int, list[CaptureFigures]],
    unread_captures: Mapping[int, int],
    recorded: Recorded,
) -> list[StepFigures]:
    """Return the data of some steps in detail, in the order of `spans`.

    Args:
        spans: The spans of the steps.
        rows: The rows of the steps in the overview, by number.
        timeline: The timeline of the run.
        captures: The captures of each step that were read, by number.
        unread_captures: The number of captures of each step that were not read, by number.
        recorded: The times in which profilers recorded.
    """
    journals = timeline.journals
    steps = [_StepSpans(span, journals) for span in spans]
    # Use a new reader: `timeline.reader` has already counted the lines that are left out, and would count them twice.
    reader, distinct = SpanReader(), Distinct()
    step_times = [(span.number, span.start_ns, span.end_ns) for span in spans]
    for number, journal in enumerate(journals):
        for batch in reader.batches(journal, ranges(timeline.zones[number], step_times)):
            for span in batch.spans:
                if (shifted_span := distinct.span(span, journal.shift_ns)) is not None:
                    for step in steps:
                        step.add(number, shifted_span)
    figures = []
    for step in steps:
        number = step.span.number
        step_figures = _figures(step, rows[number], journals, captures.get(number, []), recorded)
        figures.append(msgspec.structs.replace(step_figures, captures_left_out=unread_captures.get(number, 0)))
    return figures


def _recorded_apart_s(
    step: _StepSpans, lanes: Iterable[LaneSpans], journals: Sequence[Journal], recorded: Recorded
) -> float:
    """Return the seconds of the longest recording of a replica. If all replicas or none were recorded, return 0."""
    start, end = step.span.start_ns, step.span.end_ns
    recorded_ns = [
        recorded.of(journals[lane.file], lane.replica).length(start, end) for lane in lanes if lane.replica is not None
    ]
    return max(recorded_ns) / 1e9 if recorded_ns and not all(recorded_ns) else 0.0


def _figures(
    step: _StepSpans,
    row: StepRow,
    journals: Sequence[Journal],
    captures: list[CaptureFigures],
    recorded: Recorded,
) -> StepFigures:
    span = step.span
    lanes = step.lanes.finish()
    labels = [""] * len(journals)
    for lane in lanes:
        if lane.role == "agent_loop" or not labels[lane.file]:
            labels[lane.file] = lane.label
    gaps = step.lanes.gaps(lanes)
    shown_lanes = step.lanes.shown(lanes)
    shown_gaps = sorted(sorted(gaps, key=lambda gap: gap.start_s - gap.end_s)[:_MAX_GAPS], key=lambda gap: gap.start_s)
    return StepFigures(
        number=span.number,
        start_ns=span.start_ns,
        seconds=row.seconds,
        stages=row.stages,
        kinds=row.kinds,
        lanes=[lane.row(journals[lane.file], span.start_ns, span.end_ns) for lane in shown_lanes],
        lanes_left_out=len(lanes) - len(shown_lanes),
        gaps=shown_gaps,
        gaps_left_out=len(gaps) - len(shown_gaps),
        samples=step.samples.figures(span.start_ns, labels, [journal.name for journal in journals]),
        skews=skews(lanes, journals, recorded),
        weight_sync_s=words.seconds_of(row.stages, words.SYNC, row.kinds),
        path=step.lanes.path(lanes),
        captures=captures,
        apart_s=_recorded_apart_s(step, lanes, journals, recorded),
        findings=[],
        captured_for=windows(captures),
        kind=row.kind,
        no_stage=row.no_stage,
    )
