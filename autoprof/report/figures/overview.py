"""Overview of all steps of a run: seconds by stage, kinds of steps, slow steps, tokens.

Only sums of each step are kept. Time in which a profiler recorded is kept apart, so that recording makes no findings.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median

import msgspec

from autoprof.base.intervals import Interval, Union, exclusive
from autoprof.config import kinds
from autoprof.report.figures.timeline import RunTimeline, StepSpan, StepSums
from autoprof.report.figures.words import OTHER, OWN, several
from autoprof.report.model import StageGap, StageShare, StepRow
from autoprof.rundir.journal import Journal
from autoprof.rundir.runs import CaptureFile, Step

# The first step of each start of the trainer: it fills caches, compiles kernels and waits for late processes.
WARM_UP = "warm-up"
# A step in which a profiler recorded in some process. Recording makes it slower.
CAPTURED = "captured"
REGULAR = "regular"


def kind(first: bool, captured: bool) -> str:
    """Return the kind of a step. A captured first step is a warm-up."""
    return WARM_UP if first else CAPTURED if captured else REGULAR


def typical_steps(rows: Sequence[StepRow]) -> list[StepRow]:
    """Return the regular steps; without any the captured ones, else the warm-ups."""
    return next((found for of in (REGULAR, CAPTURED) if (found := _of(rows, of))), list(rows))


def basis(rows: Sequence[StepRow]) -> str:
    """Return the words for the steps that `typical_steps` chooses, and the others.

    An example is `1 regular step; 1 warm-up, 2 captured`.
    """
    counts = {of: len(_of(rows, of)) for of in (REGULAR, CAPTURED, WARM_UP)}
    other_kinds: tuple[str, ...] = ()
    if counts[REGULAR]:
        chosen, other_kinds = several(counts[REGULAR], "regular step"), (WARM_UP, CAPTURED)
    elif counts[CAPTURED]:
        chosen, other_kinds = f"no regular step; of {several(counts[CAPTURED], 'captured step')}", (WARM_UP,)
    else:
        chosen = f"no regular step; of {several(counts[WARM_UP], 'warm-up step')}"
    others = ", ".join(f"{counts[of]} {of}" for of in other_kinds if counts[of])
    return f"{chosen}; {others}" if others else chosen


def _of(rows: Sequence[StepRow], of: str) -> list[StepRow]:
    return [row for row in rows if row.kind == of]


# Share of a step above which time without a stage is a finding.
NO_STAGE_SHARE = 0.2


def by_stage(
    span: StepSpan, timers: Iterable[tuple[str, int, int, int]], stages: dict[str, Union], profiling: Union
) -> dict[str, float]:
    """Sum the seconds of a step by stage, each second counted once: longest first, then `OTHER`, then `OWN`.

    Autoprof's own time in any process is counted first, then the driver's timers. Time outside of all timers goes to
    the stages of all processes.
    """
    start, end = span.start_ns, span.end_ns
    sums = _owners(span, timers, stages, profiling, [(start, end)])
    own = profiling.length(start, end)
    # A timer may be called `other` too.
    other = max(0, end - start - own - sum(sums.values())) + sums.pop(OTHER, 0)
    by_stage_s = {name: length / 1e9 for name, length in sorted(sums.items(), key=lambda item: -item[1])}
    by_stage_s[OTHER] = other / 1e9
    if own:
        by_stage_s[OWN] = own / 1e9
    return by_stage_s


def without_own(stages: Mapping[str, float]) -> dict[str, float]:
    """Return the stages of a step without autoprof's own time. Shares are relative to their sum."""
    return {name: took for name, took in stages.items() if name != OWN}


def no_stage(
    span: StepSpan,
    parts: Mapping[str, float],
    timers: Iterable[tuple[str, int, int, int]],
    stages: Mapping[str, Union],
    autoprof: Iterable[Union],
) -> StageGap | None:
    """Return the time of a step in which no stage ran, if that is over a fifth of the step.

    Args:
        span: The step.
        parts: Its seconds by stage.
        timers: The timers of all processes.
        stages: The stages of all processes.
        autoprof: Autoprof's own time.
    """
    start, end = span.start_ns, span.end_ns
    whole = sum(without_own(parts).values())
    if parts[OTHER] <= NO_STAGE_SHARE * whole:
        return None
    named = [(name, low, high) for name, low, high, file in timers if file == span.file]
    named += [(name, low, high) for name, union in stages.items() for low, high in union.within(start, end)]
    own = [piece for union in autoprof for piece in union.pieces()]
    free = Union([*own, *((low, high) for _, low, high in named)]).without(start, end)
    took = sum(high - low for low, high in free) / 1e9
    if took <= NO_STAGE_SHARE * whole:
        return None
    low, high = max(free, key=lambda piece: piece[1] - piece[0])
    return StageGap(
        seconds=took,
        share=took / whole,
        start_s=(low - start) / 1e9,
        end_s=(high - start) / 1e9,
        after=max(((until, name) for name, _, until in named if start < until <= low), default=(0, ""))[1],
        before=min(((since, name) for name, since, _ in named if high <= since < end), default=(0, ""))[1],
    )


def recorded_stages(
    span: StepSpan,
    timers: Iterable[tuple[str, int, int, int]],
    stages: dict[str, Union],
    profiling: Union,
    recorded: Sequence[Interval],
) -> dict[str, float]:
    """Sum the seconds of each stage of a step in which a profiler recorded, by the rules of `by_stage`."""
    if not recorded:
        return {}
    sums = _owners(span, timers, stages, profiling, recorded)
    sums[OTHER] = (
        sums.get(OTHER, 0)
        + sum(high - low - profiling.length(low, high) for low, high in recorded)
        - sum(sums.values())
    )
    return {name: length / 1e9 for name, length in sums.items() if length > 0}


def _owners(
    span: StepSpan,
    timers: Iterable[tuple[str, int, int, int]],
    stages: dict[str, Union],
    profiling: Union,
    within: Sequence[Interval],
) -> dict[str, int]:
    """Return the nanoseconds of each stage in some parts of a step, without autoprof's own time."""
    own = [(name, low, high) for name, low, high, file in timers if file == span.file]
    sums: dict[str, int] = {}
    for start, end in within:
        pieces = [(name, low, high) for name, union in stages.items() for low, high in union.within(start, end)]
        covered = Union([*((low, high) for _, low, high in own), *profiling.pieces()])
        free = profiling.without(start, end) if profiling.within(start, end) else [(start, end)]
        for spans, parts in ((own, free), (pieces, covered.without(start, end))):
            for low, high in parts:
                for name, length in exclusive(spans, low, high).items():
                    sums[name] = sums.get(name, 0) + length
    return sums


def shares(rows: Sequence[StepRow]) -> list[StageShare]:
    """Return the sums of each stage over the typical steps, longest first; then `OTHER`, then `OWN` over all steps."""
    by_name = {name: kind for row in rows for name, kind in row.kinds.items()}
    stages = [without_own(row.stages) for row in typical_steps(rows)]
    whole = sum(sum(each.values()) for each in stages)
    of_stages = _shares(stages, whole, lambda name: by_name.get(name) or kinds.of(name))
    of_stages.sort(key=lambda share: (share.name == OTHER, -share.seconds))
    own = [{OWN: row.stages[OWN]} for row in rows if OWN in row.stages]
    return [*of_stages, *_shares(own, None, lambda _: "")]


def shares_of_kinds(rows: Sequence[StepRow], stages: Iterable[StageShare]) -> list[StageShare]:
    """Return the sums of each kind of stage over the typical steps, longest first."""
    of_stage = {stage.name: stage.kind for stage in stages if stage.kind}
    sums: list[dict[str, float]] = []
    whole = 0.0
    for row in typical_steps(rows):
        whole += sum(without_own(row.stages).values())
        sums.append(defaultdict(float))
        for name, seconds in row.stages.items():
            if name in of_stage:
                sums[-1][of_stage[name]] += seconds
    return sorted(_shares(sums, whole, str), key=lambda share: -share.seconds)


def _shares(parts: Iterable[Mapping[str, float]], whole: float | None, kind: Callable[[str], str]) -> list[StageShare]:
    of_part: dict[str, list[float]] = defaultdict(list)
    for each in parts:
        for name, seconds in each.items():
            of_part[name].append(seconds)
    return [
        StageShare(
            name=name,
            seconds=sum(values),
            share=None if whole is None else sum(values) / whole if whole else 0.0,
            steps=sum(value > 0 for value in values),
            median_s=median(values),
            kind=kind(name),
        )
        for name, values in of_part.items()
    ]


# A step is slow if it exceeds the median of the steps around it by this ratio, and by these seconds.
SLOW_RATIO, SLOW_S = 1.2, 1.0
# Steps before, and steps after, that count as around a step.
STEPS_AROUND = 10
# Steps of one kind around a step that the median needs.
MIN_STEPS = 3


def own_seconds(row: StepRow) -> float:
    """Return the seconds of a step without autoprof's own time and without the delay that recording caused."""
    return row.seconds - row.stages.get(OWN, 0.0) - sum(row.slowed.values())


def own_stages(row: StepRow) -> dict[str, float]:
    """Return the seconds of a step by stage, without autoprof's own time and the delay that recording caused."""
    return {name: took - row.slowed.get(name, 0.0) for name, took in row.stages.items() if name != OWN}


def mark_slow(rows: list[StepRow]) -> list[StepRow]:
    """Return the rows with `slowed`, `usual_s` and `slow` filled in."""
    rows = [msgspec.structs.replace(row, slowed=_slowed(rows, place)) for place, row in enumerate(rows)]
    marked = []
    for place, row in enumerate(rows):
        around = _around(rows, place)
        if len(around) >= MIN_STEPS:
            usual, own = median(map(own_seconds, around)), own_seconds(row)
            slow = own > SLOW_RATIO * usual and own - usual > SLOW_S
            row = msgspec.structs.replace(row, usual_s=usual, slow=slow)
        marked.append(row)
    return marked


def _slowed(rows: Sequence[StepRow], place: int) -> dict[str, float]:
    """Return the seconds by which recorded stages took longer than the same stages around the step, unrecorded.

    At most the recorded seconds count.
    """
    row = rows[place]
    if not row.recorded or any(each.recorded for each in _around(rows, place)):
        return {}
    usual = usual_stages(rows, place, where_done=True)
    longer = {name: min(took, row.stages.get(name, 0.0) - usual.get(name, 0.0)) for name, took in row.recorded.items()}
    return {name: more for name, more in longer.items() if more > 0 and usual.get(name)}


def _around(rows: Sequence[StepRow], place: int) -> list[StepRow]:
    """Return the steps to compare the step at `place` with.

    These are regular steps; for a captured step other captured steps, if there are enough. A warm-up is compared with
    none. If too few steps are near, the result is empty.
    """
    own = rows[place].kind
    if own == WARM_UP:
        return []
    near = [*rows[max(0, place - STEPS_AROUND) : place], *rows[place + 1 : place + 1 + STEPS_AROUND]]
    for kind in (CAPTURED, REGULAR) if own == CAPTURED else (REGULAR,):
        if len(comparable := [row for row in near if row.kind == kind]) >= MIN_STEPS:
            return comparable
    return []


def usual_stages(rows: Sequence[StepRow], place: int, where_done: bool = False) -> dict[str, float]:
    """Return the median seconds of each stage in the steps around `place`.

    The result is empty for a warm-up, and if too few steps are around it.

    Args:
        rows: All steps.
        place: The index of the step in `rows`.
        where_done: True to use only the steps that have the stage. Otherwise a step without it counts as 0.
    """
    around = _around(rows, place)
    if len(around) < MIN_STEPS:
        return {}
    stages = [own_stages(row) for row in around]
    names = {name for each in stages for name in each}
    if where_done:
        return {name: median(each[name] for each in stages if name in each) for name in names}
    return {name: median(each.get(name, 0.0) for each in stages) for name in names}


class Recorded:
    """Times in which profilers recorded, in ns on the clock of the driver's host.

    Attributes:
        anywhere: The times of all processes.
        steps: The steps with a capture that a profiler recorded, or may have recorded.
    """

    def __init__(self, steps: Iterable[Step] = (), shifts: Mapping[str, int] | None = None) -> None:
        self.anywhere = Union()
        self.steps: set[int] = set()
        # By host and pid, and by replica. A replica's requests are in the timeline of another process.
        self._by: dict[tuple[str | int, int], Union] = defaultdict(Union)
        for step in steps:
            for capture in step.captures:
                if not capture.untraced:
                    self.steps.add(step.number)
                    self._add(capture, (shifts or {}).get(capture.meta.host, 0))

    def _add(self, capture: CaptureFile, shift: int) -> None:
        meta = capture.meta
        start, end = meta.clock.start.unix_ns, meta.clock.stop.unix_ns
        if not 0 < start < end:
            return
        self.anywhere.add(start + shift, end + shift)
        if meta.pid is not None:
            self._by[meta.host, meta.pid].add(start + shift, end + shift)
        if meta.replica is not None:
            self._by["replica", meta.replica].add(start + shift, end + shift)

    def of(self, process: Journal, replica: int | None) -> Union:
        """Return the times in which a process was recorded, or, for its spans of a replica, the replica's engine."""
        return self._by.get((process.host, process.pid) if replica is None else ("replica", replica), Union())


# Share of a step in which a profiler of any process records, from which the step counts as captured.
_MIN_RECORDED_SHARE = 0.01
# Number of the driver's file if the step's driver is unknown.
NO_FILE = -1


class Overview:
    """Rows of all steps of a run.

    Attributes:
        rows: The rows of the steps that have ended, by number.
        spans: These steps, by number.
        cut_off: The rows of steps without an end, by number. Each ends with its last line.
        cut_off_spans: These steps. The file is the driver's if its timers show it, else `NO_FILE`.
    """

    def __init__(self, timeline: RunTimeline, captured: Iterable[int] = (), recorded: Recorded | None = None) -> None:
        self._timeline = timeline
        self._captured = frozenset(captured)
        self._recorded = recorded or Recorded()
        self.spans = timeline.spans
        first_steps = timeline.attempts.first_steps
        self.rows = mark_slow([self._row(span, span.start_ns in first_steps) for _, span in sorted(self.spans.items())])
        self.cut_off_spans = {
            number: _cut_off(number, sums, *timeline.between[number])
            for number, sums in sorted(timeline.steps.items())
            if number not in self.spans and sums.last_ns > sums.first_ns
        }
        # `no_stage` is a finding about ended steps only.
        self.cut_off = {
            number: msgspec.structs.replace(self._row(span, self._is_first(span)), no_stage=None)
            for number, span in self.cut_off_spans.items()
        }

    def _is_first(self, span: StepSpan) -> bool:
        """Return True if no ended step of the same attempt began before this unfinished step."""
        return not any(span.since_ns <= other.start_ns < span.start_ns for other in self.spans.values())

    def _row(self, span: StepSpan, first: bool) -> StepRow:
        sums = self._timeline.steps.get(span.number) or StepSums()
        prompt, response = sums.tokens.get("turn") or sums.tokens.get("request") or (None, None)
        length = (span.end_ns - span.start_ns) / 1e9
        parts = by_stage(span, sums.timers, sums.stages, sums.profiling)
        recorded = self._recorded.anywhere.within(span.start_ns, span.end_ns)
        # A profiler that another rank started at the edge of the step does not make it slower.
        recorded_s = sum(high - low for low, high in recorded) / 1e9
        in_profiler = span.number in self._recorded.steps or OWN in parts or recorded_s > _MIN_RECORDED_SHARE * length
        return StepRow(
            number=span.number,
            start_ns=span.start_ns,
            seconds=length,
            captured=span.number in self._captured,
            slow=False,
            usual_s=length,
            stages=parts,
            recorded=recorded_stages(span, sums.timers, sums.stages, sums.profiling, recorded),
            samples=sums.samples or None,
            prompt_tokens=None if prompt is None else int(prompt),
            response_tokens=None if response is None else int(response),
            tokens_per_s=response / length if response and length else None,
            error=span.error,
            kinds={name: kind for name, kind in self._timeline.kinds.items() if name in parts},
            kind=kind(first=first, captured=in_profiler),
            no_stage=no_stage(span, parts, sums.timers, sums.stages, [sums.profiling, sums.exports]),
        )


def _cut_off(number: int, sums: StepSums, since_ns: int, until_ns: int) -> StepSpan:
    *_, driver = max(sums.timers, key=lambda timer: timer[2], default=(NO_FILE,))
    return StepSpan(number, driver, sums.first_ns, sums.last_ns, "", None, None, since_ns, until_ns)
