"""The run over all its steps: seconds by stage, slow steps, tokens. Of each step only sums are kept."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

import msgspec

from autoprof.intervals import Union, exclusive
from autoprof.report.figures import OTHER, PROFILING, StageShare, StepRow
from autoprof.report.reading import Line, Reader, Timeline
from autoprof.traces.attempts import EVER, PROCESS, Attempts, is_of

# A step is slow that takes so much longer than the median of the steps around it, and so many seconds.
SLOW_RATIO, SLOW_S = 1.2, 1.0
# Those around it: so many before and as many after; with fewer than that in all nothing is said.
AROUND, FEWEST = 10, 3
# In place of the file of a step's driver, where there is none.
NOBODY = -1
# verl's own timer around the whole step.
WHOLE = "step"


class StepSpan(msgspec.Struct, frozen=True, gc=False):
    """A step as its driver had it. Of several that say they are the step's driver the best one counts."""

    number: int
    file: int
    start_ns: int
    end_ns: int
    role: str
    rank: int | None
    error: str | None
    # What carries its number counts as far as it lies between these: the rest is of another attempt.
    since_ns: int = 0
    until_ns: int = EVER

    def better_than(self, other: StepSpan) -> bool:
        """A trainer before an engine, rank 0 before others, what ran last before what was done again."""
        return (self.role == "trainer", not self.rank, self.start_ns) > (
            other.role == "trainer",
            not other.rank,
            other.start_ns,
        )


class _Step:
    """What is kept of a step while the files are read."""

    def __init__(self) -> None:
        self.timers: list[tuple[str, int, int, int]] = []
        self.stages: dict[str, Union] = defaultdict(Union)
        self.profiling = Union()
        # By kind: turns, and requests where there are no turns.
        self.tokens: dict[str, tuple[float, float]] = {}
        self.samples = 0
        self.first_ns, self.last_ns = EVER, 0

    def add(self, file: int, line: Line) -> None:
        """Take a line that carries the step's number, but for the step's own."""
        self.first_ns, self.last_ns = min(self.first_ns, line.start_ns), max(self.last_ns, line.end_ns)
        kind = line.kind
        if kind == "timer":
            self.timers.append((line.name, line.start_ns, line.end_ns, file))
        elif kind == "stage":
            self.stages[line.name].add(line.start_ns, line.end_ns)
        elif kind == PROFILING:
            self.profiling.add(line.start_ns, line.end_ns)
        elif line.ids.get("validate"):
            return
        elif kind == "sample":
            self.samples += 1
        elif kind in ("turn", "request") and line.counts:
            prompt, response = self.tokens.get(kind, (0, 0))
            more = line.counts.get("prompt_tokens") or 0, line.counts.get("response_tokens") or 0
            self.tokens[kind] = prompt + more[0], response + more[1]


class Overview:
    """Reads all timeline files once; twice where the run was resumed and steps ran again.

    Attributes:
        spans: The steps that have ended, by number.
        rows: The same as figures.
        cut_off: Steps that have no end, by number: as long as what is known of them.
        cut_off_spans: The same as spans, their file that of the driver where its timers tell, else `NOBODY`.
        attempts: How often the run was begun.
    """

    def __init__(self, timelines: Sequence[Timeline], reader: Reader, captured: Iterable[int] = ()) -> None:
        self.spans: dict[int, StepSpan] = {}
        self._captured = frozenset(captured)
        self._steps: dict[int, _Step] = defaultdict(_Step)
        self._unnumbered: list[tuple[str, int, int, int]] = []
        # When steps ended that the same trainer did again.
        self._before: dict[int, list[int]] = defaultdict(list)
        attempts = Attempts()
        for number, timeline in enumerate(timelines):
            for line in reader.spans(timeline):
                attempts.add(number, line)
                self._add(number, line)
        attempts.finish()
        self.attempts = attempts.count
        between = {number: self._between(number, attempts) for number in self.spans.keys() | self._steps.keys()}
        self._leave_out(timelines, between)
        self._number_timers()
        self.spans = {
            number: msgspec.structs.replace(span, since_ns=between[number][0], until_ns=between[number][1])
            for number, span in self.spans.items()
        }
        self.rows = _marked([self._row(span) for _, span in sorted(self.spans.items())])
        self.cut_off_spans = {
            number: _cut_off(number, step, *between[number])
            for number, step in sorted(self._steps.items())
            if number not in self.spans and step.last_ns > step.first_ns
        }
        self.cut_off = {number: self._row(span) for number, span in self.cut_off_spans.items()}
        self._steps.clear()

    def _add(self, file: int, line: Line) -> None:
        kind, number = line.kind, line.step
        if kind == PROCESS or (kind == "timer" and line.name == WHOLE):
            return
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
        """From when on and until when what carries a step's number is of the step as it is told."""
        span = self.spans.get(number)
        if span is None:
            # The last thing that is known of it.
            return attempts.around(self._steps[number].last_ns - 1)
        since, until = attempts.around(span.start_ns)
        return max([since, *(end for end in self._before[number] if end <= span.start_ns)]), until

    def _leave_out(self, timelines: Sequence[Timeline], between: Mapping[int, tuple[int, int]]) -> None:
        """Count anew what there is of steps that ran more than once."""
        again = {
            number
            for number, step in self._steps.items()
            if step.first_ns < between[number][0] or step.last_ns > between[number][1]
        }
        if not again:
            return
        for number in again:
            self._steps[number] = _Step()
        reader = Reader()
        for file, timeline in enumerate(timelines):
            for line in reader.spans(timeline):
                if line.step in again and line.kind != "step" and is_of(line, *between[line.step]):
                    self._add(file, line)

    def _number_timers(self) -> None:
        """Timers that don't know their step are of the step in which their middle lies."""
        order = sorted(self.spans.values(), key=lambda span: span.start_ns)
        starts = [span.start_ns for span in order]
        for timer in self._unnumbered:
            middle = (timer[1] + timer[2]) // 2
            place = bisect_right(starts, middle) - 1
            if place >= 0 and middle < order[place].end_ns:
                self._steps[order[place].number].timers.append(timer)
        self._unnumbered.clear()

    def _row(self, span: StepSpan) -> StepRow:
        step = self._steps[span.number]
        prompt, response = step.tokens.get("turn") or step.tokens.get("request") or (None, None)
        length = (span.end_ns - span.start_ns) / 1e9
        return StepRow(
            number=span.number,
            start_ns=span.start_ns,
            seconds=length,
            captured=span.number in self._captured,
            slow=False,
            usual_s=length,
            stages=by_stage(span, step.timers, step.stages, step.profiling),
            samples=step.samples or None,
            prompt_tokens=None if prompt is None else int(prompt),
            response_tokens=None if response is None else int(response),
            tokens_per_s=response / length if response and length else None,
            error=span.error,
        )


def _cut_off(number: int, step: _Step, since_ns: int, until_ns: int) -> StepSpan:
    *_, driver = max(step.timers, key=lambda timer: timer[2], default=(NOBODY,))
    return StepSpan(number, driver, step.first_ns, step.last_ns, "", None, None, since_ns, until_ns)


def by_stage(
    span: StepSpan, timers: Iterable[tuple[str, int, int, int]], stages: dict[str, Union], profiling: Union
) -> dict[str, float]:
    """Seconds of a step by stage, each second counted once, the most first and what nothing covers last.

    What autoprof itself took comes off first, whichever process waited for it. The driver's own timers have their time
    of what is left; what they leave has the stages of all processes.
    """
    start, end = span.start_ns, span.end_ns
    own = [(name, low, high) for name, low, high, file in timers if file == span.file]
    pieces = [(name, low, high) for name, union in stages.items() for low, high in union.within(start, end)]
    covered = Union([*((low, high) for _, low, high in own), *profiling.pieces()])
    sums: dict[str, int] = {}
    free = profiling.without(start, end) if profiling.within(start, end) else [(start, end)]
    for spans, parts in ((own, free), (pieces, covered.without(start, end))):
        for low, high in parts:
            for name, length in exclusive(spans, low, high).items():
                sums[name] = sums.get(name, 0) + length
    if cost := profiling.length(start, end):
        sums[PROFILING] = sums.get(PROFILING, 0) + cost
    # A timer may have that name, too.
    rest = max(0, end - start - sum(sums.values())) + sums.pop(OTHER, 0)
    found = {name: length / 1e9 for name, length in sorted(sums.items(), key=lambda item: -item[1])}
    found[OTHER] = rest / 1e9
    return found


def own_seconds(row: StepRow) -> float:
    """The seconds of a step without what autoprof took of it."""
    return row.seconds - row.stages.get(PROFILING, 0.0)


def _marked(rows: list[StepRow]) -> list[StepRow]:
    """The rows with what is usual around each, and whether it is slow."""
    marked = []
    for place, row in enumerate(rows):
        around = _around(rows, place)
        # The first one of a run fills caches, compiles kernels and starts what starts late.
        if place and len(around) >= FEWEST:
            usual, own = median(map(own_seconds, around)), own_seconds(row)
            slow = own > SLOW_RATIO * usual and own - usual > SLOW_S
            row = msgspec.structs.replace(row, usual_s=usual, slow=slow)
        marked.append(row)
    return marked


def _around(rows: Sequence[StepRow], place: int) -> list[StepRow]:
    """The steps around the one at `place`; the first of a run is like no other."""
    return [*rows[max(1, place - AROUND) : place], *rows[max(1, place + 1) : place + 1 + AROUND]]


def usual_stages(rows: Sequence[StepRow], place: int, where_done: bool = False) -> dict[str, float]:
    """The median seconds of each stage in the steps around the one at `place`; nothing for the first, or of too few.

    With `where_done` of those steps that have the stage, else of all.
    """
    around = _around(rows, place)
    if not place or len(around) < FEWEST:
        return {}
    names = {name for row in around for name in row.stages}
    if where_done:
        return {name: median(row.stages[name] for row in around if name in row.stages) for name in names}
    return {name: median(row.stages.get(name, 0.0) for row in around) for name in names}


def shares(rows: Sequence[StepRow]) -> list[StageShare]:
    """Each stage over all steps, the most seconds first, `other` last."""
    whole = sum(row.seconds for row in rows)
    of_stage: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        for name, seconds in row.stages.items():
            of_stage[name].append(seconds)
    found = [
        StageShare(
            name=name,
            seconds=sum(values),
            share=sum(values) / whole if whole else 0.0,
            steps=sum(value > 0 for value in values),
            median_s=median(values),
        )
        for name, values in of_stage.items()
    ]
    return sorted(found, key=lambda share: (share.name == OTHER, -share.seconds))
