"""Data of the steps that a report shows in detail, and of their captures.

The journals are read a second time for these steps. The data of a capture is computed from the sums of its trace.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import msgspec

from autoprof.base.intervals import Union
from autoprof.base.redact import writable
from autoprof.config import values
from autoprof.config.values import PREFIX
from autoprof.report import model
from autoprof.report.lanes import Lanes, skews
from autoprof.report.model import CaptureFigures, DeviceShares, Finding, SampleFigures, StepFigures, StepRow
from autoprof.report.overview import REGULAR, WARM_UP, Recorded, typical_steps
from autoprof.report.samples import INSIDE, Samples
from autoprof.report.timeline import WHOLE, Distinct, RunTimeline, StepSpan
from autoprof.rundir import file_names
from autoprof.rundir.file_names import NSYS_REPORT, SNAPSHOT, TRACE
from autoprof.rundir.journal import Journal, SpanReader, ranges
from autoprof.rundir.records import Line
from autoprof.rundir.runs import CaptureFile, Step
from autoprof.traces.clocks import is_of
from autoprof.traces.reader import NO_JSON, Reader, TraceError
from autoprof.traces.summary import DeviceSums, summarize

DAMAGED = "damaged"
# For the ending of each kind of file that is not a Chrome trace: the tool that writes the file, and the program that
# opens the file.
_TOOLS = {
    NSYS_REPORT: ("nsys", "Nsight Systems: nsys-ui FILE, or nsys stats FILE"),
    SNAPSHOT: ("memory", "pytorch.org/memory_viz, which loads it in the browser"),
}
_ASCEND = "MindStudio Insight; if torch_npu has not analysed the folder yet, run autoprof analyse first"


# Maximum number of captures of one stage that are read. Reading a real trace takes seconds, and most ranks have similar
# traces.
_MAX_RANKS = 16
# Numbers of captures among them that are not complete, that are the longest and that are the shortest.
_MAX_FAILED, _LONGEST, _SHORTEST = 4, 6, 2


def choose_captures(captures: Sequence[CaptureFile]) -> list[CaptureFile]:
    """Return the captures to read. If a stage has more than 16 captures, return 16 of them.

    At most 4 captures that are not complete come first, then the 6 longest and the 2 shortest captures, then others.
    """
    stages: dict[tuple[str, str, str], list[CaptureFile]] = {}
    for capture in captures:
        meta = capture.meta
        stages.setdefault((meta.role or capture.name.split(".")[0], meta.stage, meta.part), []).append(capture)
    kept_names: set[str] = set()
    for of_stage in stages.values():
        failed = [capture for capture in of_stage if capture.state != "complete"][:_MAX_FAILED]
        by_length = sorted((capture for capture in of_stage if capture.state == "complete"), key=_recorded_ns)
        ordered_captures = [*failed, *by_length[-_LONGEST:], *by_length[:_SHORTEST], *of_stage]
        kept_names |= set(list(dict.fromkeys(capture.name for capture in ordered_captures))[:_MAX_RANKS])
    return [capture for capture in captures if capture.name in kept_names]


def _recorded_ns(capture: CaptureFile) -> int:
    return capture.meta.clock.stop.unix_ns - capture.meta.clock.start.unix_ns


def capture_figures(step: Step, capture: CaptureFile, zero_ns: int | None, operators: int) -> CaptureFigures:
    """Return the data that the report shows for one capture. If the trace can't be read, the state is `DAMAGED`.

    Args:
        step: The step whose folder contains the capture.
        capture: The files of the capture.
        zero_ns: The start of the step, on the clock of the capture's host. None if unknown.
        operators: The maximum number of operators, and of kernels, to keep.
    """
    folder = Path(step.folder)
    path = _file(folder, capture.name)
    unread = CaptureFigures(
        name=writable(capture.name),
        step=step.number,
        role=capture.meta.role or capture.name.split(".")[0],
        stage=capture.meta.stage,
        stage_kind=capture.meta.stage_kind or values.kind_of(capture.meta.stage),
        rank=capture.meta.rank,
        replica=capture.meta.replica,
        host=capture.meta.host or None,
        pid=capture.meta.pid,
        part=capture.meta.part,
        file=writable(f"{folder.name}/{path.name if path else capture.name}"),
        state=capture.state,
        tool=capture.meta.tool,
        bytes=capture.bytes,
        reason=capture.meta.reason,
        window=capture.meta.window,
        slowest=capture.meta.slowest,
    )
    if path is None:
        return unread
    for ending, (tool, opening_program) in _TOOLS.items():
        if path.name.endswith(ending):
            return msgspec.structs.replace(unread, tool=unread.tool or tool, opens_with=opening_program)
    if path.is_dir():
        return msgspec.structs.replace(unread, tool=unread.tool or "npu", opens_with=_ASCEND)
    try:
        sums = summarize(path, _stage_ranges(capture, step.number))
    except (TraceError, OSError) as error:
        return msgspec.structs.replace(unread, state=DAMAGED, reason=writable(str(error).replace(f"{path}: ", "")))
    peaks = sorted(sums.memory, key=lambda peak: (peak.device != "cpu", peak.allocated_bytes))
    return msgspec.structs.replace(
        unread,
        tool=unread.tool or "torch",
        state="truncated" if sums.cut and unread.state == "complete" else unread.state,
        start_s=None if zero_ns is None or sums.first_ns is None else (sums.first_ns - zero_ns) / 1e9,
        seconds=sums.span_us / 1e6,
        collectives_s=None if sums.collectives_us is None else sums.collectives_us / 1e6,
        events=sums.events,
        operators=sums.operators[:operators],
        kernels=sums.kernels[:operators],
        devices=[_device_shares(device) for device in sums.devices],
        engine=sums.engine,
        memory_peak_bytes=max(peaks[-1].allocated_bytes, peaks[-1].reserved_bytes) if peaks else None,
        memory_total_bytes=_memory_total(path) if peaks and peaks[-1].device != "cpu" else None,
        bound=sums.bound,
        flame=sums.flame,
        reason="; ".join(filter(None, [unread.reason, sums.cut, sums.reason])),
    )


def _stage_ranges(capture: CaptureFile, step: int) -> list[str]:
    """Return the names of the ranges that autoprof puts around the stage, or around the steps of a whole-step trace."""
    meta = capture.meta
    return [f"{meta.role}.{meta.stage}", *(f"global_step {number}" for number in (meta.steps or [step]))]


def place_of(capture: CaptureFigures) -> str:
    """Return a text that names the stage and process of a capture.

    Examples are `actor.update_actor rank 0` and `rollout replica 1 frontend`.
    """
    stage = f".{capture.stage}" if capture.stage and capture.stage != capture.role else ""
    if capture.replica is not None:
        return f"{capture.role}{stage} replica {capture.replica} {capture.part}".rstrip()
    return f"{capture.role}{stage}" + ("" if capture.rank is None else f" rank {capture.rank}")


def windows(captures: Sequence[CaptureFigures]) -> list[str]:
    """Return the reasons for some captures, each reason once. Leave out the reason `AUTOPROF_STEPS`."""
    reasons = dict.fromkeys(capture.window for capture in captures)
    return [reason for reason in reasons if reason and not reason.startswith(f"{PREFIX}STEPS=")]


def _file(folder: Path, name: str) -> Path | None:
    for ending in (TRACE, NSYS_REPORT, SNAPSHOT):
        if (path := folder / f"{name}{ending}").is_file():
            return path
    return next((path for path in sorted(folder.glob(f"{name}*{file_names.NPU_FOLDER}")) if path.is_dir()), None)


def _device_shares(sums: DeviceSums) -> DeviceShares:
    """Return the parts of the recorded time in which a device computed, communicated, copied or was idle."""
    span = sums.span_us or 1.0
    return DeviceShares(
        device=sums.name or f"device {sums.device}",
        seconds=sums.span_us / 1e6,
        compute=sums.compute_us / span,
        communication=sums.communication_us / span,
        copy=sums.copy_us / span,
        idle=sums.idle_us / span,
        overlap=sums.overlap_us / sums.communication_us if sums.communication_us else None,
    )


class _Device(msgspec.Struct):
    """A GPU in `deviceProperties` of a trace, as Kineto writes it."""

    totalGlobalMem: int = 0


def _memory_total(path: Path) -> int | None:
    """Return the memory of the smallest device that the trace describes, in bytes. Return None if it describes none."""
    try:
        with Reader(path) as reader:
            devices = msgspec.json.decode(reader.fields.get("deviceProperties", b"[]"), type=list[_Device])
    except (TraceError, *NO_JSON):
        return None
    return min((device.totalGlobalMem for device in devices if device.totalGlobalMem), default=None)


# Maximum number of slow steps, and of captured steps, that are shown in detail if the user chose no steps. The captured
# steps with the highest numbers are shown. The last number limits the steps with the costliest findings.
_MAX_SLOW, _MAX_CAPTURED, _MAX_FOUND = 4, 4, 2
# Maximum numbers of slow steps and of warm-ups that are not shown in detail, but whose cause is searched.
_MAX_MORE_SLOW, _MAX_WARM_UPS = 12, 4
_MAX_GAPS = 100


def choose(
    rows: Sequence[StepRow], cut_off: Iterable[StepRow] = (), costliest_findings: Iterable[Finding] = ()
) -> list[int]:
    """Return the numbers of the steps that a report shows in detail if the user chose no steps.

    The report shows slow steps, captured steps, and the steps of the costliest findings. If a run has no such steps,
    the report shows one typical step.

    Args:
        rows: The steps that have ended.
        cut_off: The steps that have not ended. They are chosen only if they were captured.
        costliest_findings: Findings about steps, the costliest first.
    """
    captured_steps = sorted(row.number for row in (*rows, *cut_off) if row.captured)[-_MAX_CAPTURED:]
    numbers_found = dict.fromkeys(finding.step for finding in costliest_findings if finding.step is not None)
    chosen = {*_slowest(rows)[:_MAX_SLOW], *captured_steps, *list(numbers_found)[:_MAX_FOUND]}
    return sorted(chosen or _typical(rows))


def more_to_judge(rows: Sequence[StepRow], shown: Collection[int]) -> list[int]:
    """Return the numbers of steps that are not shown in detail, but that the rules judge too.

    These are further slow steps, the slowest first, and warm-ups, in which only ranks are compared. If no other step is
    regular, the typical step is judged, because it shows what each step loses.
    """
    more_steps = [number for number in _slowest(rows) if number not in shown][:_MAX_MORE_SLOW]
    more_steps += [number for number in warm_ups(rows) if number not in shown]
    judged = {*shown, *more_steps}
    has_regular = any(row.kind == REGULAR for row in rows if row.number in judged)
    return more_steps + [number for number in _typical(rows) if not has_regular and number not in judged]


def warm_ups(rows: Sequence[StepRow]) -> list[int]:
    """Return the numbers of the last warm-up steps, which are the first steps of each start of the trainer."""
    return [row.number for row in rows if row.kind == WARM_UP][-_MAX_WARM_UPS:]


def _typical(rows: Sequence[StepRow]) -> list[int]:
    """Return a list with the number of the step with the median time. If no step has ended, return an empty list."""
    typical_rows = sorted(typical_steps(rows), key=lambda row: row.seconds)
    return [row.number for row in typical_rows[len(typical_rows) // 2 :][:1]]


def _slowest(rows: Sequence[StepRow]) -> list[int]:
    return [row.number for row in sorted(rows, key=lambda row: row.usual_s - row.seconds) if row.slow]


class _DetailedStep:
    """Collector of the spans of one step while the journals are read."""

    def __init__(self, span: StepSpan, journals: Sequence[Journal], profiling: Union) -> None:
        self.span = span
        self._profiling = profiling
        self._journals = journals
        self._lanes = Lanes(journals, span)
        self._samples = Samples()

    def add(self, file: int, line: Line) -> None:
        is_own = line.step == self.span.number and is_of(line, self.span.since_ns, self.span.until_ns)
        overlaps = line.start_ns < self.span.end_ns and line.end_ns > self.span.start_ns
        if not is_own and not overlaps:
            return
        if line.kind == "step" or (line.kind == "timer" and (line.name == WHOLE or file != self.span.file)):
            return
        self._lanes.add(file, line, is_own or line.step is None)
        if is_own and (line.kind == "sample" or line.kind in INSIDE):
            self._samples.add(file, line)

    def figures(
        self, row: StepRow, captures: list[CaptureFigures], captures_left_out: int, recorded: Recorded
    ) -> StepFigures:
        """Return the data of the step. Call this method after all spans were added."""
        span, journals = self.span, self._journals
        self._lanes.finish()
        lanes, shown_lanes, gaps = self._lanes.lanes, self._lanes.shown(), self._lanes.gaps()
        longest_gaps = sorted(gaps, key=lambda gap: gap.start_s - gap.end_s)[:_MAX_GAPS]
        return StepFigures(
            number=span.number,
            start_ns=span.start_ns,
            seconds=row.seconds,
            stages=row.stages,
            kinds=row.kinds,
            lanes=[lane.row(journals[lane.file], span.start_ns, span.end_ns) for lane in shown_lanes],
            lanes_left_out=len(lanes) - len(shown_lanes),
            gaps=sorted(longest_gaps, key=lambda gap: gap.start_s),
            gaps_left_out=len(gaps) - len(longest_gaps),
            samples=self._sample_figures(),
            skews=skews(lanes, journals, recorded, self._profiling),
            weight_sync_s=float(model.seconds_of(row.stages, model.SYNC, row.kinds)),
            path=self._lanes.path(),
            captures=[self._with_own_time(capture) for capture in captures],
            captures_left_out=captures_left_out,
            apart_s=self._recorded_apart_s(recorded),
            findings=[],
            captured_for=windows(captures),
            kind=row.kind,
            no_stage=row.no_stage,
            slowed=row.slowed,
            own_shares=row.own_shares,
            own_times=[
                ((start - span.start_ns) / 1e9, (end - span.start_ns) / 1e9)
                for start, end in self._profiling.within(span.start_ns, span.end_ns)
            ],
        )

    def _with_own_time(self, capture: CaptureFigures) -> CaptureFigures:
        """Return the data of a capture with autoprof's own time in other captures while this capture recorded."""
        if capture.start_s is None or not capture.seconds:
            return capture
        start_ns = self.span.start_ns + round(capture.start_s * 1e9)
        own_ns = self._profiling.length(start_ns, start_ns + round(capture.seconds * 1e9))
        return msgspec.structs.replace(capture, own_s=own_ns / 1e9)

    def _sample_figures(self) -> SampleFigures | None:
        labels = [""] * len(self._journals)
        for lane in self._lanes.lanes:
            if lane.role == "agent_loop" or not labels[lane.file]:
                labels[lane.file] = lane.label
        return self._samples.figures(self.span.start_ns, labels, [journal.name for journal in self._journals])

    def _recorded_apart_s(self, recorded: Recorded) -> float:
        """Return the seconds of the longest recording of a replica. If all replicas or none were recorded, return 0."""
        recorded_ns = [
            recorded.recorded_times(self._journals[lane.file], lane.replica).length(
                self.span.start_ns, self.span.end_ns
            )
            for lane in self._lanes.lanes
            if lane.replica is not None
        ]
        return max(recorded_ns) / 1e9 if recorded_ns and not all(recorded_ns) else 0.0


class _StepsByTime:
    """Index of steps, which finds the steps of a span without asking each step."""

    def __init__(self, steps: Sequence[_DetailedStep]) -> None:
        self._ordered = sorted(steps, key=lambda step: step.span.start_ns)
        self._by_number = {step.span.number: step for step in steps}
        self._starts = [step.span.start_ns for step in self._ordered]
        # For each step, the latest end of the step and of all steps before it. Unlike the ends, they are ordered.
        self._ends = list(accumulate((step.span.end_ns for step in self._ordered), max))

    def steps_of(self, line: Line) -> list[_DetailedStep]:
        """Return the step with the number of the span, and the steps that may overlap the span in time."""
        first, end = bisect_right(self._ends, line.start_ns), bisect_left(self._starts, line.end_ns)
        found = self._ordered[first:end]
        numbered = None if line.step is None else self._by_number.get(line.step)
        return found if numbered is None or numbered in found else [*found, numbered]


def details(
    spans: Sequence[StepSpan],
    rows: Mapping[int, StepRow],
    timeline: RunTimeline,
    captures: Mapping[int, list[CaptureFigures]],
    captures_left_out: Mapping[int, int],
    recorded: Recorded,
) -> list[StepFigures]:
    """Return the data of some steps in detail, in the order of `spans`.

    Args:
        spans: The spans of the steps.
        rows: The rows of the steps in the overview, by number.
        timeline: The timeline of the run.
        captures: The captures of each step that were read, by number.
        captures_left_out: The number of captures of each step that were not read, by number.
        recorded: The times in which profilers recorded.
    """
    steps = [_DetailedStep(span, timeline.journals, timeline.profiling) for span in spans]
    by_time = _StepsByTime(steps)
    # Use a new reader: `timeline.reader` has already counted the lines that are left out, and would count them twice.
    reader, distinct = SpanReader(), Distinct()
    step_times = [(span.number, span.start_ns, span.end_ns) for span in spans]
    for number, journal in enumerate(timeline.journals):
        for batch in reader.batches(journal, ranges(timeline.zones[number], step_times)):
            for span in batch.spans:
                if (shifted_span := distinct.span(span, journal.shift_ns)) is not None:
                    for step in by_time.steps_of(shifted_span):
                        step.add(number, shifted_span)
    return [
        step.figures(rows[number], captures.get(number, []), captures_left_out.get(number, 0), recorded)
        for step in steps
        for number in [step.span.number]
    ]
