"""Overview of all steps of a run: seconds of each stage, kinds of steps, slow steps, tokens.

Only sums of each step are kept. The time in which a profiler recorded is summed separately. So the delay that recording
causes does not lead to findings.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import chain
from statistics import median

import msgspec

from autoprof.base.intervals import Interval, Union, exclusive
from autoprof.config import values
from autoprof.report.model import OTHER, OWN, StageGap, StageShare, StepRow, ValidationRow, several
from autoprof.report.timeline import TOKEN_KINDS, RunTimeline, StepSpan, StepSums
from autoprof.rundir.journal import Journal
from autoprof.rundir.runs import CaptureFile, Step

# Kind of the first step after each start of the trainer. This step fills caches, compiles kernels and waits for late
# processes.
WARM_UP = "warm-up"
# Kinds of steps that autoprof made slower: a profiler recorded in at least one process, or autoprof wrote the traces of
# an earlier step.
CAPTURED, WRITING = "captured", "writing traces"
REGULAR = "regular"


def typical_steps(rows: Sequence[StepRow]) -> list[StepRow]:
    """Return the regular steps, or else the steps that autoprof made slower, or else the warm-ups."""
    regular_rows = [row for row in rows if row.kind == REGULAR]
    return regular_rows or [row for row in rows if row.kind in (CAPTURED, WRITING)] or list(rows)


def basis(rows: Sequence[StepRow]) -> str:
    """Return a text that counts the steps that `typical_steps` chooses, and the other steps.

    An example is `1 regular step; 1 warm-up, 2 captured`.
    """
    counts = Counter(row.kind for row in rows)
    chosen_kinds = {row.kind for row in typical_steps(rows)}
    chosen = [several(counts[kind], f"{kind} step") for kind in (REGULAR, WARM_UP, CAPTURED) if kind in chosen_kinds]
    chosen += [f"{counts[WRITING]} {WRITING}"] if WRITING in chosen_kinds else []
    text = chosen[0] if counts[REGULAR] else f"{' and '.join(chosen)}, because no step is regular"
    others = [
        f"{counts[kind]} {kind}" for kind in (WARM_UP, CAPTURED, WRITING) if counts[kind] and kind not in chosen_kinds
    ]
    return f"{text}; {', '.join(others)}" if others else text


# Smallest cost of a finding: LEAST_S is in seconds, LEAST_SHARE is a share of the step. The larger of both applies.
LEAST_S, LEAST_SHARE = 1.0, 0.03
# If no stage runs for more than this share of a step, or for the smallest cost of a finding at one time, the time
# without a stage is a finding.
NO_STAGE_SHARE = 0.2


def by_stage(span: StepSpan, sums: StepSums) -> dict[str, float]:
    """Return the seconds of each stage of a step: the longest stage first, then `OTHER`, then `OWN`.

    Each second counts for one stage only. autoprof's own time in any process is counted first, then the driver's
    timers. Time outside of all timers counts for the stages of rank 0 of each role, then for the stages of all ranks,
    then for the stages that ran beside the step.
    Under torchrun each rank runs the whole loop: only the driver's own stages count, so the table shows its loop.
    """
    start, end = span.start_ns, span.end_ns
    stages_ns = _stages_ns_in(span, sums, [(start, end)])
    own_ns = sums.profiling.length(start, end)
    # A timer may be called `other` too.
    other_ns = max(0, end - start - own_ns - sum(stages_ns.values())) + stages_ns.pop(OTHER, 0)
    by_stage_s = {name: length / 1e9 for name, length in sorted(stages_ns.items(), key=lambda item: -item[1])}
    by_stage_s[OTHER] = other_ns / 1e9
    if own_ns:
        by_stage_s[OWN] = own_ns / 1e9
    return by_stage_s


def without_autoprof(stages: Mapping[str, float]) -> dict[str, float]:
    """Return the stages of a step without autoprof's own time. Shares are relative to the sum of these stages."""
    return {name: took for name, took in stages.items() if name != OWN}


def free_time(span: StepSpan, sums: StepSums) -> list[Interval]:
    """Return the times of a step in which no stage and no timer ran, and autoprof did not delay the step."""
    start, end = span.start_ns, span.end_ns
    named_intervals = _named(span, sums)
    covered = Union([*sums.profiling.pieces(), *((low, high) for _, low, high in named_intervals)])
    return list(covered.without(start, end))


def no_stage(span: StepSpan, sums: StepSums, parts: Mapping[str, float]) -> StageGap | None:
    """Return the time of a step in which no stage ran, if this time is long.

    It is long if it is over a fifth of the step, or if a part of it takes at least a second and 3 % of the step.

    Args:
        span: The step.
        sums: The sums of the step.
        parts: The seconds of each stage in the step, from `by_stage`.
    """
    start, end = span.start_ns, span.end_ns
    stages_s = sum(without_autoprof(parts).values())
    long_s, long_part_s = NO_STAGE_SHARE * stages_s, max(LEAST_S, LEAST_SHARE * stages_s)
    if parts[OTHER] <= long_s and parts[OTHER] < long_part_s:
        return None
    free = free_time(span, sums)
    free_s = sum(high - low for low, high in free) / 1e9
    low, high = max(free, key=lambda piece: piece[1] - piece[0], default=(start, start))
    if free_s <= long_s and (high - low) / 1e9 < long_part_s:
        return None
    named_intervals = _named(span, sums)
    return StageGap(
        seconds=free_s,
        share=free_s / stages_s,
        start_s=(low - start) / 1e9,
        end_s=(high - start) / 1e9,
        after=max(((until, name) for name, _, until in named_intervals if start < until <= low), default=(0, ""))[1],
        before=min(((since, name) for name, since, _ in named_intervals if high <= since < end), default=(0, ""))[1],
    )


# If more than this share of a stage is autoprof's own time, the seconds of the stage are not judged.
MAX_OWN_SHARE = 0.2


def own_shares(span: StepSpan, sums: StepSums, parts: Mapping[str, float]) -> dict[str, float]:
    """Return the share of autoprof's own time in each stage of a step, for shares over a fifth.

    Args:
        span: The step.
        sums: The sums of the step.
        parts: The seconds of each stage in the step without autoprof's own time, from `by_stage`.
    """
    if OWN not in parts:
        return {}
    own_time_included = msgspec.structs.replace(sums, profiling=Union())
    shares_found = {}
    for name, took in by_stage(span, own_time_included).items():
        if took > 0 and (share := 1 - parts.get(name, 0.0) / took) > MAX_OWN_SHARE:
            shares_found[name] = share
    return shares_found


def recorded_stages(span: StepSpan, sums: StepSums, recorded: Sequence[Interval]) -> dict[str, float]:
    """Return the seconds of each stage of a step in which a profiler recorded.

    Each second counts for one stage only, by the rules of `by_stage`.
    """
    if not recorded:
        return {}
    stages_ns = _stages_ns_in(span, sums, recorded)
    recorded_ns = sum(high - low - sums.profiling.length(low, high) for low, high in recorded)
    stages_ns[OTHER] = stages_ns.get(OTHER, 0) + recorded_ns - sum(stages_ns.values())
    return {name: length / 1e9 for name, length in stages_ns.items() if length > 0}


def _stages_ns_in(span: StepSpan, sums: StepSums, intervals: Sequence[Interval]) -> dict[str, int]:
    """Return the nanoseconds of each stage in the intervals `intervals` of a step, without autoprof's own time."""
    all_ranks = {name: union for name, union in sums.stages.items() if sums.files.get(name) != span.file}
    stages_ns: dict[str, int] = defaultdict(int)
    for start, end in intervals:
        covered = Union(sums.profiling.within(start, end))
        for spans in (
            _timers(span, sums),
            _within(sums.first_ranks, start, end),
            _within(all_ranks, start, end),
            _within(sums.beside, start, end),
        ):
            for low, high in covered.without(start, end):
                for name, length in exclusive(spans, low, high).items():
                    stages_ns[name] += length
            for _, low, high in spans:
                covered.add(low, high)
    return stages_ns


def _timers(span: StepSpan, sums: StepSums) -> list[tuple[str, int, int]]:
    """Return the name, the start and the end of each timer of the step's driver."""
    return [(name, start, end) for name, start, end, file in sums.timers if file == span.file]


def _named(span: StepSpan, sums: StepSums) -> list[tuple[str, int, int]]:
    """Return the name, the start and the end of each timer of the driver, and of each stage that ran in the step."""
    stages = (_within(each, span.start_ns, span.end_ns) for each in (sums.stages, sums.beside))
    return [*_timers(span, sums), *chain.from_iterable(stages)]


def _within(stages: Mapping[str, Union], start: int, end: int) -> list[tuple[str, int, int]]:
    """Return the name of each stage with the intervals from `start` to `end` in which it ran."""
    return [(name, low, high) for name, union in stages.items() for low, high in union.within(start, end)]


def shares(rows: Sequence[StepRow]) -> list[StageShare]:
    """Return the time of each stage, summed over the typical steps, the longest first.

    `OTHER` follows the stages. `OWN`, which is summed over all steps, comes last.
    """
    kind_of = {name: kind for row in rows for name, kind in row.kinds.items()}
    stages = [without_autoprof(row.stages) for row in typical_steps(rows)]
    whole_s = sum(sum(each.values()) for each in stages)
    stage_shares = _stage_shares(stages, whole_s, lambda name: kind_of.get(name) or values.kind_of(name))
    stage_shares.sort(key=lambda share: (share.name == OTHER, -share.seconds))
    if own_s := [row.stages[OWN] for row in rows if OWN in row.stages]:
        # The last export may end in a step without captures. Such a step does not count for the median.
        median_s = median([row.stages[OWN] for row in rows if OWN in row.stages and row.captured] or own_s)
        stage_shares.append(StageShare(name=OWN, seconds=sum(own_s), share=None, steps=len(own_s), median_s=median_s))
    return stage_shares


def shares_of_kinds(rows: Sequence[StepRow], stages: Iterable[StageShare]) -> list[StageShare]:
    """Return the time of each kind of stage, summed over the typical steps, the longest first."""
    kind_of = {stage.name: stage.kind for stage in stages if stage.kind}
    sums: list[dict[str, float]] = []
    whole_s = 0.0
    for row in typical_steps(rows):
        whole_s += sum(without_autoprof(row.stages).values())
        sums.append(defaultdict(float))
        for name, seconds in row.stages.items():
            if name in kind_of:
                sums[-1][kind_of[name]] += seconds
    return sorted(_stage_shares(sums, whole_s, str), key=lambda share: -share.seconds)


def _stage_shares(parts: Iterable[Mapping[str, float]], whole_s: float, kind: Callable[[str], str]) -> list[StageShare]:
    seconds_of: dict[str, list[float]] = defaultdict(list)
    for each in parts:
        for name, seconds in each.items():
            seconds_of[name].append(seconds)
    return [
        StageShare(
            name=name,
            seconds=sum(values),
            share=sum(values) / whole_s if whole_s else 0.0,
            steps=sum(value > 0 for value in values),
            median_s=median(values),
            kind=kind(name),
        )
        for name, values in seconds_of.items()
    ]


def validations(timeline: RunTimeline, rows: Sequence[StepRow]) -> list[ValidationRow]:
    """Return the validations outside of steps, in order. If steps have ended, only of the processes that drove them.

    A validation is named after the last step before it in the same attempt. If there is no such step, it is named after
    the next step.
    """
    found = []
    drivers = {span.file for span in timeline.spans.values()}
    for name, start, end, file in sorted(timeline.validations, key=lambda timer: timer[1]):
        since, until = timeline.attempts.around(start)
        is_inside = any(row.start_ns <= start < row.start_ns + row.seconds * 1e9 for row in rows)
        if is_inside or (drivers and file not in drivers):
            continue
        steps = [row for row in rows if since <= row.start_ns < until]
        earlier = [row for row in steps if row.start_ns <= start]
        later = [row for row in steps if row.start_ns > start]
        found.append(
            ValidationRow(
                name=name,
                start_ns=start,
                seconds=(end - start) / 1e9,
                after=max(earlier, key=lambda row: row.start_ns).number if earlier else None,
                before=min(later, key=lambda row: row.start_ns).number if later else None,
            )
        )
    return found


# A step is slow if it takes more than SLOW_RATIO times the median of the steps around it, and more than SLOW_S seconds
# longer than this median.
SLOW_RATIO, SLOW_S = 1.2, 1.0
# The steps around a step are this number of steps before it, and the same number of steps after it.
STEPS_AROUND = 10
# Minimum number of steps of one kind around a step from which a median is computed.
MIN_STEPS = 3


def own_seconds(row: StepRow) -> float:
    """Return the seconds of a step, without autoprof's own time and without the delay that recording caused."""
    return row.seconds - row.stages.get(OWN, 0.0) - sum(row.slowed.values())


def own_stages(row: StepRow) -> dict[str, float]:
    """Return the seconds of each stage of a step without the delay that recording caused, except autoprof's own."""
    return {name: took - row.slowed.get(name, 0.0) for name, took in row.stages.items() if name != OWN}


def mark_slow(rows: list[StepRow]) -> list[StepRow]:
    """Return the rows of all steps, with computed values in the fields `slowed`, `usual_s` and `slow`."""
    rows = [msgspec.structs.replace(row, slowed=_delays_by_recording(rows, place)) for place, row in enumerate(rows)]
    marked_rows = []
    for place, row in enumerate(rows):
        if nearby := _around(rows, place):
            usual_s, own_s = median(map(own_seconds, nearby)), own_seconds(row)
            is_slow = own_s > SLOW_RATIO * usual_s and own_s - usual_s > SLOW_S
            row = msgspec.structs.replace(row, usual_s=usual_s, slow=is_slow)
        marked_rows.append(row)
    return marked_rows


def _delays_by_recording(rows: Sequence[StepRow], place: int) -> dict[str, float]:
    """Return the seconds by which each recorded stage of a step took longer than usual.

    The usual time is the median of the same stage in the steps around the step, which must not be recorded. At most the
    recorded seconds of a stage count. If autoprof's own time is over a fifth of a stage, the whole excess counts, also
    if the steps around the step were recorded.
    """
    row = rows[place]
    limits_s = {} if any(each.recorded for each in _around(rows, place)) else row.recorded
    limits_s = limits_s | dict.fromkeys(row.own_shares, float("inf"))
    if not limits_s:
        return {}
    usual_s = usual_stages(rows, place, only_steps_with_stage=True)
    excess_s = {
        name: min(limit, row.stages.get(name, 0.0) - usual_s.get(name, 0.0))
        for name, limit in limits_s.items()
        if usual_s.get(name) or name in row.own_shares
    }
    return {name: excess for name, excess in excess_s.items() if excess > 0}


def _around(rows: Sequence[StepRow], place: int) -> list[StepRow]:
    """Return the steps around the step with the index `place`, to compare the step with them.

    A step is compared with regular steps. If autoprof made the step slower, and enough steps of the same kind are near,
    it is compared with these instead. If too few steps are near, or for a warm-up, the list is empty.
    """
    own_kind = rows[place].kind
    if own_kind == WARM_UP:
        return []
    near_rows = [*rows[max(0, place - STEPS_AROUND) : place], *rows[place + 1 : place + 1 + STEPS_AROUND]]
    regular = [row for row in near_rows if row.kind == REGULAR]
    alike = [row for row in near_rows if row.kind == own_kind and bool(row.recorded) == bool(rows[place].recorded)]
    for comparable in (alike, regular) if own_kind != REGULAR else (regular,):
        if len(comparable) >= MIN_STEPS:
            return comparable
    return []


def usual_stages(rows: Sequence[StepRow], place: int, only_steps_with_stage: bool = False) -> dict[str, float]:
    """Return the median seconds of each stage in the steps around a step.

    The dict is empty if the step is a warm-up, or if too few steps are around it.

    Args:
        rows: All steps.
        place: The index of the step in `rows`.
        only_steps_with_stage: True to compute the median of a stage only from steps with this stage. If False, a step
            without the stage counts as 0.
    """
    nearby = _around(rows, place)
    if len(nearby) < MIN_STEPS:
        return {}
    stages = [own_stages(row) for row in nearby]
    names = {name for each in stages for name in each}
    if only_steps_with_stage:
        return {name: median(each[name] for each in stages if name in each) for name in names}
    return {name: median(each.get(name, 0.0) for each in stages) for name in names}


class Recorded:
    """Times in which profilers recorded, in ns on the clock of the driver's host.

    Attributes:
        anywhere: The times in which a profiler recorded in any process.
        steps: The numbers of the steps with a capture that a profiler recorded, or may have recorded.
    """

    def __init__(self, steps: Iterable[Step], shifts: Mapping[str, int]) -> None:
        self.anywhere = Union()
        self.steps: set[int] = set()
        # Dict from (host, pid), and from ("replica", number), to the times. The times of a replica are kept too,
        # because the requests to a replica are in the timeline of another process than the replica's recorded process.
        self._by: dict[tuple[str | int, int], Union] = defaultdict(Union)
        for step in steps:
            for capture in step.captures:
                if not capture.untraced:
                    self.steps.add(step.number)
                    self._add(capture, shifts.get(capture.meta.host, 0))

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

    def recorded_times(self, process: Journal, replica: int | None) -> Union:
        """Return the times in which a profiler recorded the work of a process, or of a replica if `replica` is set."""
        return self._by.get((process.host, process.pid) if replica is None else ("replica", replica), Union())


# If profilers of any process recorded, or autoprof was at work, in more than this share of a step, the step counts as
# captured.
_MIN_RECORDED_SHARE = 0.01


class Overview:
    """Rows of all steps of a run.

    Attributes:
        rows: The rows of the steps that have ended, ordered by number.
        spans: The steps that have ended, by number.
        cut_off: The rows of steps without an end, by number. Each row ends with the last line of the step.
        cut_off_spans: The steps without an end, by number. If timers show the driver, `file` is the number of the
            driver's journal, else `NO_FILE`.
    """

    def __init__(self, timeline: RunTimeline, captured: Container[int], recorded: Recorded) -> None:
        self._timeline = timeline
        self._captured = captured
        self._recorded = recorded
        self.spans = timeline.spans
        first_steps = timeline.attempts.first_steps
        self.rows = mark_slow([self._row(span, span.start_ns in first_steps) for _, span in sorted(self.spans.items())])
        self.cut_off_spans = {
            number: StepSpan(
                number, sums.driver, sums.first_ns, sums.last_ns, "", None, None, *timeline.between[number]
            )
            for number, sums in sorted(timeline.steps.items())
            if number not in self.spans and sums.trains and sums.last_ns > sums.first_ns
        }
        # Remove `no_stage`, because it leads to a finding, and only ended steps shall have this finding.
        self.cut_off = {
            number: msgspec.structs.replace(self._row(span, self._is_first(span)), no_stage=None)
            for number, span in self.cut_off_spans.items()
        }

    def _is_first(self, span: StepSpan) -> bool:
        """Return True if no ended step of the same attempt began before this unfinished step."""
        return not any(span.since_ns <= other.start_ns < span.start_ns for other in self.spans.values())

    def _row(self, span: StepSpan, is_first: bool) -> StepRow:
        sums = self._timeline.steps.get(span.number) or StepSums()
        prompt, response = next((sums.tokens[kind] for kind in TOKEN_KINDS if kind in sums.tokens), (None, None))
        length = (span.end_ns - span.start_ns) / 1e9
        parts = by_stage(span, sums)
        recorded = self._recorded.anywhere.within(span.start_ns, span.end_ns)
        # If another rank's profiler records only at the edge of the step, or an export ends there, the step is not
        # slower.
        recorded_s, own_s = sum(high - low for low, high in recorded) / 1e9, parts.get(OWN, 0.0)
        writing_s = self._timeline.writing.length(span.start_ns, span.end_ns) / 1e9
        least_s = _MIN_RECORDED_SHARE * length
        in_profiler = span.number in self._recorded.steps or recorded_s + own_s - writing_s > least_s
        slower_kind = CAPTURED if in_profiler else WRITING if own_s > least_s else REGULAR
        return StepRow(
            number=span.number,
            start_ns=span.start_ns,
            seconds=length,
            captured=span.number in self._captured,
            slow=False,
            usual_s=length,
            stages=parts,
            recorded=recorded_stages(span, sums, recorded),
            samples=sums.samples or None,
            prompt_tokens=None if prompt is None else int(prompt),
            response_tokens=None if response is None else int(response),
            tokens_per_s=response / length if response and length else None,
            error=span.error,
            kinds={name: kind for name, kind in self._timeline.kinds.items() if name in parts},
            kind=WARM_UP if is_first else slower_kind,
            no_stage=no_stage(span, sums, parts),
            own_shares=own_shares(span, sums, parts),
        )
