"""Overview of all steps of a run: seconds by stage, kinds of steps, slow steps, tokens.

Only sums of each step are kept. Time in which a profiler recorded is kept apart, so that recording makes no findings.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median

import msgspec

from autoprof.base.intervals import Interval, Union, exclusive
from autoprof.config import kinds
from autoprof.report.figures import index
from autoprof.report.figures.index import Index, StepSpan, Sums
from autoprof.report.figures.reading import Reader, Timeline
from autoprof.report.figures.words import OTHER, OWN, PROFILING, several
from autoprof.report.figures.zones import Zone, noted
from autoprof.report.model import StageGap, StageShare, StepRow
from autoprof.rundir.records import EXPORT, PROCESS, Line
from autoprof.rundir.runs import CaptureFile, Step
from autoprof.traces.clocks import EVER, Attempts, is_of

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

    def of(self, process: Timeline, replica: int | None) -> Union:
        """Return the times in which a process was recorded, or, for its spans of a replica, the replica's engine."""
        return self._by.get((process.host, process.pid) if replica is None else ("replica", replica), Union())


# Number of the driver's file if the step's driver is unknown.
NO_FILE = -1
# verl's own timer around the whole step.
WHOLE = "step"


class _StepSums:
    """Sums of one step while the files are read."""

    def __init__(self) -> None:
        self.timers: list[tuple[str, int, int, int]] = []
        self.stages: dict[str, Union] = defaultdict(Union)
        self.profiling = Union()
        # Kept apart from `profiling`, because stages continue during an export.
        self.exports = Union()
        # Prompt and response tokens by kind of span. Requests count only if there are no turns.
        self.tokens: dict[str, tuple[float, float]] = {}
        self.samples = 0
        self.first_ns, self.last_ns = EVER, 0

    def kept(self) -> Sums:
        """Return the sums for the index."""
        return Sums(
            timers=self.timers,
            stages={name: union.pieces() for name, union in self.stages.items()},
            profiling=self.profiling.pieces(),
            exports=self.exports.pieces(),
            tokens=self.tokens,
            samples=self.samples,
            first_ns=self.first_ns,
            last_ns=self.last_ns,
        )

    @classmethod
    def of(cls, sums: Sums) -> _StepSums:
        """Return the sums from the index."""
        step = cls()
        step.timers, step.tokens, step.samples = sums.timers, sums.tokens, sums.samples
        step.stages.update({name: Union(pieces) for name, pieces in sums.stages.items()})
        step.profiling, step.exports = Union(sums.profiling), Union(sums.exports)
        step.first_ns, step.last_ns = sums.first_ns, sums.last_ns
        return step

    def add(self, file: int, line: Line) -> None:
        """Add a line with this step's number. Lines of kind `step` are not added."""
        self.first_ns, self.last_ns = min(self.first_ns, line.start_ns), max(self.last_ns, line.end_ns)
        kind = line.kind
        if kind == "timer":
            self.timers.append((line.name, line.start_ns, line.end_ns, file))
        elif kind == "stage":
            self.stages[line.name].add(line.start_ns, line.end_ns)
        elif kind == PROFILING:
            (self.exports if line.name == EXPORT else self.profiling).add(line.start_ns, line.end_ns)
        elif line.ids.get("validate"):
            return
        elif kind == "sample":
            self.samples += 1
        elif kind in ("turn", "request") and line.counts:
            prompt, response = self.tokens.get(kind, (0, 0))
            more = line.counts.get("prompt_tokens") or 0, line.counts.get("response_tokens") or 0
            self.tokens[kind] = prompt + more[0], response + more[1]


class Overview:
    """Sums of all timeline files of a run.

    Each file is read once, or twice if steps ran again after the run was resumed. Large timelines have an index
    (`index.py`), which replaces the first reading.

    Attributes:
        spans: The steps that have ended, by number.
        rows: The rows of these steps.
        cut_off: The rows of steps without an end, by number. Each ends with its last line.
        cut_off_spans: The spans of these steps. The file is the driver's if its timers show it, else `NO_FILE`.
        attempts: The number of times that the run was started.
        zones: The zones of each file.
        kinds: The kinds of stages that their names don't show, by name.
    """

    def __init__(
        self,
        timelines: Sequence[Timeline],
        reader: Reader,
        captured: Iterable[int] = (),
        recorded: Recorded | None = None,
        run: Path | None = None,
    ) -> None:
        self.spans: dict[int, StepSpan] = {}
        self._captured = frozenset(captured)
        self._recorded = recorded or Recorded()
        self._steps: dict[int, _StepSums] = defaultdict(_StepSums)
        self._unnumbered: list[tuple[str, int, int, int]] = []
        # Ends of earlier runs of a step that the same trainer ran again.
        self._before: dict[int, list[int]] = defaultdict(list)
        self.zones: list[list[Zone]] = []
        self.kinds: dict[str, str] = {}
        attempts = Attempts()
        stamp = index.stamp(timelines)
        known = index.read(run, stamp)
        if known is None:
            for number, timeline in enumerate(timelines):
                zones: list[Zone] = []
                self.zones.append(zones)
                spans = reader.spans(timeline, _adder(zones))
                for line in noted(spans, zones):
                    attempts.add(number, line)
                    self._add(number, line)
            attempts.finish()
            if not reader.failed:
                index.write(run, stamp, lambda: self._kept(stamp, reader, attempts))
        else:
            self._take_over(known, reader, attempts)
        self.attempts = attempts.count
        between = {number: self._between(number, attempts) for number in self.spans.keys() | self._steps.keys()}
        self._leave_out(timelines, between)
        self._number_timers()
        self.spans = {
            number: msgspec.structs.replace(span, since_ns=between[number][0], until_ns=between[number][1])
            for number, span in self.spans.items()
        }
        self.rows = mark_slow(
            [self._row(span, span.start_ns in attempts.first_steps) for _, span in sorted(self.spans.items())]
        )
        self.cut_off_spans = {
            number: _cut_off(number, step, *between[number])
            for number, step in sorted(self._steps.items())
            if number not in self.spans and step.last_ns > step.first_ns
        }
        # `no_stage` is a finding about ended steps only.
        self.cut_off = {
            number: msgspec.structs.replace(self._row(span, self._is_first(span)), no_stage=None)
            for number, span in self.cut_off_spans.items()
        }
        self._steps.clear()

    def _kept(self, stamp: index.Stamp, reader: Reader, attempts: Attempts) -> Index:
        return Index(
            stamp=stamp,
            zones=self.zones,
            spans=list(self.spans.values()),
            steps={number: step.kept() for number, step in self._steps.items()},
            unnumbered=self._unnumbered,
            before=dict(self._before),
            attempts=attempts.starts,
            first_steps=sorted(attempts.first_steps),
            left_out=[(*where, count) for where, count in reader.left_out.items()],
            beyond=dict(reader.beyond),
            kinds=self.kinds,
        )

    def _take_over(self, known: Index, reader: Reader, attempts: Attempts) -> None:
        self.zones, self.kinds = known.zones, known.kinds
        self.spans = {span.number: span for span in known.spans}
        self._steps.update({number: _StepSums.of(sums) for number, sums in known.steps.items()})
        self._unnumbered = known.unnumbered
        self._before.update(known.before)
        attempts.starts, attempts.first_steps = known.attempts, set(known.first_steps)
        known.restore_notes(reader)

    def _add(self, file: int, line: Line) -> None:
        kind, number = line.kind, line.step
        if kind == PROCESS or (kind == "timer" and line.name == WHOLE):
            return
        if line.stage_kind and kinds.of(line.name) != line.stage_kind:
            self.kinds[line.name] = line.stage_kind
        if number is None:
            if kind == "timer":
                self._unnumbered.append((line.name, line.start_ns, line.end_ns, file))
        elif kind == "step":
            self._take(StepSpan(number, file, line.start_ns, line.end_ns, line.role, line.rank, line.error))
        else:
            self._steps[number].add(file, line)

    def _take(self, span: StepSpan) -> None:
        other = self.spans.get(span.number)
        if other is None:
            self.spans[span.number] = span
            return
        best, worse = (span, other) if span.better_than(other) else (other, span)
        self.spans[span.number] = best
        if best.role == worse.role == "trainer" and not best.rank and not worse.rank:
            self._before[span.number].append(worse.end_ns)

    def _between(self, number: int, attempts: Attempts) -> tuple[int, int]:
        """Return the times between which lines with a step's number belong to its reported run."""
        span = self.spans.get(number)
        if span is None:
            # Use the attempt of the step's last line.
            return attempts.around(self._steps[number].last_ns - 1)
        since, until = attempts.around(span.start_ns)
        return max([since, *(end for end in self._before[number] if end <= span.start_ns)]), until

    def _leave_out(self, timelines: Sequence[Timeline], between: Mapping[int, tuple[int, int]]) -> None:
        """Sum the steps that ran more than once again, without the lines of their earlier runs."""
        again = {
            number
            for number, step in self._steps.items()
            if step.first_ns < between[number][0] or step.last_ns > between[number][1]
        }
        if not again:
            return
        for number in again:
            self._steps[number] = _StepSums()
        reader = Reader()
        for file, timeline in enumerate(timelines):
            for line in reader.spans(timeline):
                if line.step in again and line.kind != "step" and is_of(line, *between[line.step]):
                    self._add(file, line)

    def _number_timers(self) -> None:
        """Add timers without a step number to the step that contains their middle."""
        order = sorted(self.spans.values(), key=lambda span: span.start_ns)
        starts = [span.start_ns for span in order]
        for timer in self._unnumbered:
            middle = (timer[1] + timer[2]) // 2
            place = bisect_right(starts, middle) - 1
            if place >= 0 and middle < order[place].end_ns:
                self._steps[order[place].number].timers.append(timer)
        self._unnumbered.clear()

    def _is_first(self, span: StepSpan) -> bool:
        """Return True if no ended step of the same attempt began before this unfinished step."""
        return not any(span.since_ns <= other.start_ns < span.start_ns for other in self.spans.values())

    def _row(self, span: StepSpan, first: bool) -> StepRow:
        step = self._steps[span.number]
        prompt, response = step.tokens.get("turn") or step.tokens.get("request") or (None, None)
        length = (span.end_ns - span.start_ns) / 1e9
        parts = by_stage(span, step.timers, step.stages, step.profiling)
        recorded = self._recorded.anywhere.within(span.start_ns, span.end_ns)
        in_profiler = span.number in self._recorded.steps or bool(recorded) or OWN in parts
        return StepRow(
            number=span.number,
            start_ns=span.start_ns,
            seconds=length,
            captured=span.number in self._captured,
            slow=False,
            usual_s=length,
            stages=parts,
            recorded=recorded_stages(span, step.timers, step.stages, step.profiling, recorded),
            samples=step.samples or None,
            prompt_tokens=None if prompt is None else int(prompt),
            response_tokens=None if response is None else int(response),
            tokens_per_s=response / length if response and length else None,
            error=span.error,
            kinds={name: kind for name, kind in self.kinds.items() if name in parts},
            kind=kind(first=first, captured=in_profiler),
            no_stage=no_stage(span, parts, step.timers, step.stages, [step.profiling, step.exports]),
        )


def _adder(zones: list[Zone]) -> Callable[[int], None]:
    return lambda begin: zones.append(Zone(begin))


def _cut_off(number: int, step: _StepSums, since_ns: int, until_ns: int) -> StepSpan:
    *_, driver = max(step.timers, key=lambda timer: timer[2], default=(NO_FILE,))
    return StepSpan(number, driver, step.first_ns, step.last_ns, "", None, None, since_ns, until_ns)
