"""The run over all its steps: seconds by stage, slow steps, tokens. Of each step only sums are kept."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

import msgspec

from autoprof.report.figures import OTHER, StageShare, StepRow
from autoprof.report.intervals import Union, exclusive
from autoprof.report.reading import Line, Reader, Timeline

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
        # By kind: turns, and requests where there are no turns.
        self.tokens: dict[str, tuple[float, float]] = {}
        self.samples = 0


class Overview:
    """Reads all timeline files once.

    Attributes:
        spans: The steps that have ended, by number.
        rows: The same as figures.
        cut_off: Steps that have no end, by number: as long as their stages, with nobody who drove them.
    """

    def __init__(self, timelines: Sequence[Timeline], reader: Reader, captured: Iterable[int] = ()) -> None:
        self.spans: dict[int, StepSpan] = {}
        self._captured = frozenset(captured)
        self._steps: dict[int, _Step] = defaultdict(_Step)
        self._unnumbered: list[tuple[str, int, int, int]] = []
        for number, timeline in enumerate(timelines):
            for line in reader.spans(timeline):
                self._add(number, line)
        self._number_timers()
        self.rows = _marked([self._row(span) for _, span in sorted(self.spans.items())])
        self.cut_off = {
            number: self._row(_bounds(number, step.stages))
            for number, step in sorted(self._steps.items())
            if number not in self.spans and any(union.length() for union in step.stages.values())
        }
        self._steps.clear()

    def _add(self, file: int, line: Line) -> None:
        kind, number = line.kind, line.step
        if kind == "timer":
            if line.name != WHOLE:
                timer = (line.name, line.start_ns, line.end_ns, file)
                (self._unnumbered if number is None else self._steps[number].timers).append(timer)
            return
        if number is None:
            return
        step = self._steps[number]
        if kind == "step":
            span = StepSpan(number, file, line.start_ns, line.end_ns, line.role, line.rank, line.error)
            if number not in self.spans or span.better_than(self.spans[number]):
                self.spans[number] = span
        elif kind == "stage":
            step.stages[line.name].add(line.start_ns, line.end_ns)
        elif line.ids.get("validate"):
            return
        elif kind == "sample":
            step.samples += 1
        elif kind in ("turn", "request") and line.counts:
            prompt, response = step.tokens.get(kind, (0, 0))
            more = line.counts.get("prompt_tokens") or 0, line.counts.get("response_tokens") or 0
            step.tokens[kind] = prompt + more[0], response + more[1]

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
            stages=by_stage(span, step.timers, step.stages),
            samples=step.samples or None,
            prompt_tokens=None if prompt is None else int(prompt),
            response_tokens=None if response is None else int(response),
            tokens_per_s=response / length if response and length else None,
            error=span.error,
        )


def _bounds(number: int, stages: Mapping[str, Union]) -> StepSpan:
    pieces = [piece for union in stages.values() for piece in union.pieces()]
    start, end = min(start for start, _ in pieces), max(end for _, end in pieces)
    return StepSpan(number, NOBODY, start, end, "", None, None)


def by_stage(span: StepSpan, timers: Iterable[tuple[str, int, int, int]], stages: dict[str, Union]) -> dict[str, float]:
    """Seconds of a step by stage, each second counted once, the most first and what nothing covers last.

    The driver's own timers have their time; what they leave has the stages of all processes.
    """
    start, end = span.start_ns, span.end_ns
    own = [(name, low, high) for name, low, high, file in timers if file == span.file]
    covered = Union((low, high) for _, low, high in own)
    pieces = [(name, low, high) for name, union in stages.items() for low, high in union.within(start, end)]
    sums = exclusive(own, start, end)
    for low, high in covered.without(start, end):
        for name, length in exclusive(pieces, low, high).items():
            sums[name] = sums.get(name, 0) + length
    found = {name: length / 1e9 for name, length in sorted(sums.items(), key=lambda item: -item[1])}
    found[OTHER] = max(0.0, (end - start - sum(sums.values())) / 1e9)
    return found


def _marked(rows: list[StepRow]) -> list[StepRow]:
    """The rows with what is usual around each, and whether it is slow."""
    marked = []
    for place, row in enumerate(rows):
        around = _around(rows, place)
        # The first one of a run fills caches, compiles kernels and starts what starts late.
        if place and len(around) >= FEWEST:
            usual = median(each.seconds for each in around)
            slow = row.seconds > SLOW_RATIO * usual and row.seconds - usual > SLOW_S
            row = msgspec.structs.replace(row, usual_s=usual, slow=slow)
        marked.append(row)
    return marked


def _around(rows: Sequence[StepRow], place: int) -> list[StepRow]:
    """The steps around the one at `place`; the first of a run is like no other."""
    return [*rows[max(1, place - AROUND) : place], *rows[max(1, place + 1) : place + 1 + AROUND]]


def usual_stages(rows: Sequence[StepRow], place: int) -> dict[str, float]:
    """The median seconds of each stage in the steps around the one at `place`; nothing for the first, or of too few."""
    around = _around(rows, place)
    if not place or len(around) < FEWEST:
        return {}
    names = {name for row in around for name in row.stages}
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
