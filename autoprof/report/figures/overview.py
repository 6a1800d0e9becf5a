"""Overview of all steps of a run: seconds by stage, slow steps, tokens. Of each step only sums are kept."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from autoprof.base.intervals import Union
from autoprof.config import kinds
from autoprof.report.figures import index, step_kinds
from autoprof.report.figures.index import Index, StepSpan, Sums
from autoprof.report.figures.reading import Reader, Timeline
from autoprof.report.figures.recorded import Recorded
from autoprof.report.figures.slow_steps import mark_slow
from autoprof.report.figures.stage_shares import by_stage, no_stage, recorded_stages
from autoprof.report.figures.words import OWN, PROFILING
from autoprof.report.figures.zones import Zone, noted
from autoprof.report.model.run import StepRow
from autoprof.rundir.lines import EXPORT, PROCESS, Line
from autoprof.traces.attempts import EVER, Attempts, is_of

# In place of the file of a step's driver, where there is none.
NOBODY = -1
# verl's own timer around the whole step.
WHOLE = "step"


class _Step:
    """Sums of one step while the files are read."""

    def __init__(self) -> None:
        self.timers: list[tuple[str, int, int, int]] = []
        self.stages: dict[str, Union] = defaultdict(Union)
        self.profiling = Union()
        # Stages continue beside an export.
        self.exports = Union()
        # By kind: turns, and requests where there are no turns.
        self.tokens: dict[str, tuple[float, float]] = {}
        self.samples = 0
        self.first_ns, self.last_ns = EVER, 0

    def kept(self) -> Sums:
        """Return it for the index."""
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
    def of(cls, sums: Sums) -> _Step:
        """Return it from the index."""
        step = cls()
        step.timers, step.tokens, step.samples = sums.timers, sums.tokens, sums.samples
        step.stages.update({name: Union(pieces) for name, pieces in sums.stages.items()})
        step.profiling, step.exports = Union(sums.profiling), Union(sums.exports)
        step.first_ns, step.last_ns = sums.first_ns, sums.last_ns
        return step

    def add(self, file: int, line: Line) -> None:
        """Take a line that carries the step's number, but for the step's own."""
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
    """Reader of all timeline files, once; twice where the run was resumed and steps ran again. Large ones have an index
    (`index.py`), which stands for the first reading.

    Attributes:
        spans: The steps that have ended, by number.
        rows: The same as figures.
        cut_off: Steps that have no end, by number: as long as what is known of them.
        cut_off_spans: The same as spans, their file that of the driver where its timers tell, else `NOBODY`.
        attempts: How often the run was begun.
        zones: Those of each file.
        kinds: The kinds of stages by name, where the name does not tell.
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
        self._steps: dict[int, _Step] = defaultdict(_Step)
        self._unnumbered: list[tuple[str, int, int, int]] = []
        # When steps ended that the same trainer did again.
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
        # The rules of rows look at steps that have ended.
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
        self._steps.update({number: _Step.of(sums) for number, sums in known.steps.items()})
        self._unnumbered = known.unnumbered
        self._before.update(known.before)
        attempts.starts, attempts.first_steps = known.attempts, set(known.first_steps)
        known.tell(reader)

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
        """Return the times between which lines with a step's number belong to the step as it is told."""
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
        """Give timers without a step to the step in which their middle lies."""
        order = sorted(self.spans.values(), key=lambda span: span.start_ns)
        starts = [span.start_ns for span in order]
        for timer in self._unnumbered:
            middle = (timer[1] + timer[2]) // 2
            place = bisect_right(starts, middle) - 1
            if place >= 0 and middle < order[place].end_ns:
                self._steps[order[place].number].timers.append(timer)
        self._unnumbered.clear()

    def _is_first(self, span: StepSpan) -> bool:
        """Return True if no step of the same attempt began before this one, which has not ended."""
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
            kind=step_kinds.kind(first=first, captured=in_profiler),
            no_stage=no_stage(span, parts, step.timers, step.stages, [step.profiling, step.exports]),
        )


def _adder(zones: list[Zone]) -> Callable[[int], None]:
    return lambda begin: zones.append(Zone(begin))


def _cut_off(number: int, step: _Step, since_ns: int, until_ns: int) -> StepSpan:
    *_, driver = max(step.timers, key=lambda timer: timer[2], default=(NOBODY,))
    return StepSpan(number, driver, step.first_ns, step.last_ns, "", None, None, since_ns, until_ns)
