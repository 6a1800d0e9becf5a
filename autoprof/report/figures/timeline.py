"""The timeline of a run: sums of its steps, from the journals of all processes.

Only sums are kept, since a large run has millions of spans. With the sums come the parts of the journals that each step
needs, so that a step in detail reads little. The cache of a large run has both, until a journal changes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from autoprof.base.intervals import Union
from autoprof.config import kinds
from autoprof.report.figures.words import PROFILING, listed, several
from autoprof.rundir import cache
from autoprof.rundir.cache import Stamp
from autoprof.rundir.journal import (
    EVER,
    INDEX,
    Journal,
    JournalIndex,
    SpanReader,
    Zone,
    journal_stamps,
    journals,
    ranges,
)
from autoprof.rundir.records import EXPORT, Line
from autoprof.traces import clocks
from autoprof.traces.clocks import Attempts
from autoprof.traces.event_rows import OTHER_NAMES
from autoprof.traces.reader import TraceError

# verl's own timer around the whole step.
WHOLE = "step"
# Distinct names of spans, roles and steps that are read. Some programs put a number into every name, and the page grows
# with each name.
MAX_DISTINCT = {"name": 1_000, "role": 200, "step": 100_000}
# Notes on left-out lines. A large run has thousands of files.
_MAX_NOTES = 20


def journals_of(run: Path) -> tuple[list[Journal], list[str]]:
    """Return the journals of a run with the shifts of their clocks, and notes on the clocks."""
    files = journals(run)
    hosts = {file.host for file in files}
    if len(hosts) < 2:
        return files, []
    try:
        measured = clocks.read_offsets(run)
    except (TraceError, OSError) as error:
        return files, [f"clocks of {len(hosts)} hosts are not corrected; their own settings are used: {error}"]
    # The best measurement of each host is precise enough for a report, which shows seconds.
    best = {host: min(offsets, key=lambda offset: offset.error_ns) for host, offsets in measured.offsets.items()}
    with_shifts = [
        msgspec.structs.replace(file, shift_ns=-best[file.host].offset_ns) if file.host in best else file
        for file in files
    ]
    unknown = sorted(hosts - best.keys() - {measured.driver})
    if len(unknown) > 1:
        return with_shifts, [f"clocks of {listed(unknown)} were not measured; their own settings are used"]
    return with_shifts, [f"the clock of {host} was not measured; its own setting is used" for host in unknown]


Timer = tuple[str, int, int, int]


class Distinct:
    """The first distinct names, roles and steps, at most `MAX_DISTINCT` of each.

    Attributes:
        beyond: The number of spans with another name, role or step.
    """

    def __init__(self) -> None:
        self._first: dict[str, set[str | int]] = {"name": set(), "role": set(), "step": set()}
        self.beyond: Counter[str] = Counter()

    def has(self, what: str, value: str | int) -> bool:
        """Return True if a value is among the first ones. Count it otherwise."""
        first = self._first[what]
        if value not in first:
            if len(first) >= MAX_DISTINCT[what]:
                self.beyond[what] += 1
                return False
            first.add(value)
        return True

    def span(self, span: Line, shift_ns: int) -> Line | None:
        """Return a span on the clock of the driver's host, or None if its time or its step is left out."""
        if not 0 < span.start_ns <= span.end_ns or (span.step is not None and not self.has("step", span.step)):
            return None
        beyond = [what for what in ("name", "role") if not self.has(what, getattr(span, what))]
        changes: dict[str, str | int] = dict.fromkeys(beyond, OTHER_NAMES)
        if shift_ns:
            changes |= {"start_ns": span.start_ns + shift_ns, "end_ns": span.end_ns + shift_ns}
        return msgspec.structs.replace(span, **changes) if changes else span


class StepSpan(Struct, frozen=True, gc=False):
    """A step, as its driver recorded it. `better_than` chooses between several drivers of the same step.

    Attributes:
        file: The number of the driver's journal.
        since_ns: The start of the attempt that the step belongs to. Earlier lines with its number are not its own.
        until_ns: The end of that attempt.
    """

    number: int
    file: int
    start_ns: int
    end_ns: int
    role: str
    rank: int | None
    error: str | None

    since_ns: int = 0
    until_ns: int = EVER

    def better_than(self, other: StepSpan) -> bool:
        """Return True if this driver is the better one: a trainer, then rank 0, then the later run of the step."""
        return (self.role == "trainer", not self.rank, self.start_ns) > (
            other.role == "trainer",
            not other.rank,
            other.start_ns,
        )


class StepSums(Struct):
    """Sums of one step.

    Attributes:
        timers: Name, start, end and number of the journal of each timer.
        stages: The time of each stage, in any process.
        profiling: Autoprof's own time that delays the run.
        exports: The time of exports, in which stages continue.
        tokens: Prompt and response tokens, by kind of span. Requests count only if there are no turns.
        samples: The number of samples.
        first_ns: The start of the first span with the step's number, other than the step itself.
        last_ns: The end of the last such span.
    """

    timers: list[Timer] = []
    stages: dict[str, Union] = {}
    profiling: Union = msgspec.field(default_factory=Union)
    exports: Union = msgspec.field(default_factory=Union)
    tokens: dict[str, tuple[float, float]] = {}
    samples: int = 0
    first_ns: int = EVER
    last_ns: int = 0

    def add_tokens(self, span: Line) -> None:
        """Add the tokens of a turn or request."""
        prompt, response = self.tokens.get(span.kind, (0, 0))
        more = span.counts.get("prompt_tokens") or 0, span.counts.get("response_tokens") or 0
        self.tokens[span.kind] = prompt + more[0], response + more[1]


class _Index(JournalIndex):
    """Part of the cache: the attributes of a `RunTimeline`."""

    spans: list[StepSpan]
    steps: dict[int, StepSums]
    unnumbered: list[Timer]
    before: dict[int, list[int]]
    first_steps: list[int]
    left_out: list[tuple[str, str, int]]
    beyond: dict[str, int]
    kinds: dict[str, str]


class RunTimeline:
    """Sums of the steps of a run.

    Each journal is read once. Steps that ran again after the run was resumed are read a second time.

    Attributes:
        journals: The journals.
        spans: The steps that have ended, by number.
        steps: The sums of all steps, by number.
        between: The times between which lines with a step's number belong to its last run, by number.
        attempts: The attempts of the run.
        zones: The zones of each journal.
        kinds: The kinds of stages that their names don't show, by name.
        reader: The reader, which has counted the lines that are left out.
    """

    def __init__(self, journals: Sequence[Journal], run: Path | None = None) -> None:
        self.journals = journals
        self.spans: dict[int, StepSpan] = {}
        self.steps: dict[int, StepSums] = defaultdict(StepSums)
        self.zones: list[list[Zone]] = []
        self.kinds: dict[str, str] = {}
        self.attempts = Attempts()
        self.reader = SpanReader()
        self._distinct = Distinct()
        self._unnumbered: list[Timer] = []
        # Ends of earlier runs of a step that the same trainer ran again.
        self._before: dict[int, list[int]] = defaultdict(list)
        stamps = journal_stamps(journals)
        cached = run is not None and cache.is_worth(stamps)
        if not (run and cached and self._read_index(run, stamps)):
            for number in range(len(journals)):
                self.zones.append(self._read(number))
            self.attempts.finish()
            if run and cached and not self.reader.failed:
                self._write_index(run, stamps)
        self.between = {number: self._between(number) for number in self.spans.keys() | self.steps.keys()}
        self._leave_out_earlier_runs()
        self._number_timers()
        self.spans = {
            number: msgspec.structs.replace(span, since_ns=self.between[number][0], until_ns=self.between[number][1])
            for number, span in self.spans.items()
        }

    def _read(self, file: int) -> list[Zone]:
        """Add the spans of a journal. Return its zones."""
        journal = self.journals[file]
        shift, zones = journal.shift_ns, []
        for batch in self.reader.batches(journal):
            zone = Zone(batch.begin)
            zones.append(zone)
            sums, current = None, None
            for span in batch.spans:
                start, end, number = span.start_ns + shift, span.end_ns + shift, span.step
                if not 0 < span.start_ns <= span.end_ns:
                    self.reader.left_out[journal.name, "without a time"] += 1
                    continue
                if start < zone.start_ns:
                    zone.start_ns = start
                if end > zone.end_ns:
                    zone.end_ns = end
                if span.role == "trainer" or span.kind == "step":
                    self.attempts.add(file, span, start, end)
                if number is None:
                    if span.kind == "timer":
                        self._unnumbered.append((self._name(span), start, end, file))
                    continue
                if number != current or sums is None:
                    if number not in self.steps and not self._distinct.has("step", number):
                        continue
                    current, sums = number, self.steps[number]
                    zone.first_step, zone.last_step = min(zone.first_step, number), max(zone.last_step, number)
                self._add(file, span, sums, start, end)
        return zones

    def _add(self, file: int, span: Line, sums: StepSums, start: int, end: int) -> None:
        """Add a span with a step's number to the sums of the step."""
        kind, name = span.kind, span.name
        if kind == "step":
            self._take(StepSpan(span.step or 0, file, start, end, span.role, span.rank, span.error))
            return
        if kind == "timer" and name == WHOLE:
            return
        if start < sums.first_ns:
            sums.first_ns = start
        if end > sums.last_ns:
            sums.last_ns = end
        if kind == "stage":
            stage = sums.stages.get(name)
            if stage is None:
                name = self._name(span)
                stage = sums.stages.setdefault(name, Union())
            stage.add(start, end)
        elif kind == "timer":
            sums.timers.append((self._name(span), start, end, file))
        elif kind == PROFILING:
            (sums.exports if name == EXPORT else sums.profiling).add(start, end)
        elif kind == "sample":
            sums.samples += not span.ids.get("validate")
        elif kind in ("turn", "request") and span.counts and not span.ids.get("validate"):
            sums.add_tokens(span)

    def _name(self, span: Line) -> str:
        """Return the name of a stage or timer. Keep its kind if the name does not show it."""
        if not self._distinct.has("name", span.name):
            return OTHER_NAMES
        if span.stage_kind and kinds.of(span.name) != span.stage_kind:
            self.kinds[span.name] = span.stage_kind
        return span.name

    def _take(self, span: StepSpan) -> None:
        other = self.spans.get(span.number)
        if other is None:
            self.spans[span.number] = span
            return
        best, worse = (span, other) if span.better_than(other) else (other, span)
        self.spans[span.number] = best
        if best.role == worse.role == "trainer" and not best.rank and not worse.rank:
            self._before[span.number].append(worse.end_ns)

    def _between(self, number: int) -> tuple[int, int]:
        span = self.spans.get(number)
        if span is None:
            # Use the attempt of the step's last line.
            return self.attempts.around(self.steps[number].last_ns - 1)
        since, until = self.attempts.around(span.start_ns)
        return max([since, *(end for end in self._before[number] if end <= span.start_ns)]), until

    def _leave_out_earlier_runs(self) -> None:
        """Sum the steps that ran more than once again, without the lines of their earlier runs."""
        again = {
            number
            for number, sums in self.steps.items()
            if sums.first_ns < self.between[number][0] or sums.last_ns > self.between[number][1]
        }
        if not again:
            return
        for number in again:
            self.steps[number] = StepSums()
        reader, steps = SpanReader(), [(number, 0, 0) for number in again]
        for file, journal in enumerate(self.journals):
            shift = journal.shift_ns
            for batch in reader.batches(journal, ranges(self.zones[file], steps)):
                for span in batch.spans:
                    if span.step is None or span.step not in again or span.kind == "step":
                        continue
                    start, end = span.start_ns + shift, span.end_ns + shift
                    since, until = self.between[span.step]
                    if 0 < span.start_ns <= span.end_ns and end > since and start < until:
                        self._add(file, span, self.steps[span.step], start, end)

    def _number_timers(self) -> None:
        """Add timers without a step number to the step that contains their middle."""
        order = sorted(self.spans.values(), key=lambda span: span.start_ns)
        starts = [span.start_ns for span in order]
        for timer in self._unnumbered:
            middle = (timer[1] + timer[2]) // 2
            place = bisect_right(starts, middle) - 1
            if place >= 0 and middle < order[place].end_ns:
                self.steps[order[place].number].timers.append(timer)
        self._unnumbered.clear()

    def _read_index(self, run: Path, stamps: dict[str, Stamp]) -> bool:
        """Take over the cached sums. Return False if they do not match the present state of the journals."""
        index = cache.get(run, INDEX, _Index, lambda _, pieces: Union(pieces))
        shifts = [journal.shift_ns for journal in self.journals]
        if index is None or index.stamps != stamps or index.shifts_ns != shifts or len(index.zones) != len(shifts):
            return False
        self.zones, self.kinds, self._unnumbered = index.zones, index.kinds, index.unnumbered
        self.spans = {span.number: span for span in index.spans}
        self.steps.update(index.steps)
        self._before.update(index.before)
        self.attempts.starts, self.attempts.first_steps = index.attempts, set(index.first_steps)
        self.reader.left_out.update({(file, reason): count for file, reason, count in index.left_out})
        self._distinct.beyond.update(index.beyond)
        return True

    def _write_index(self, run: Path, stamps: dict[str, Stamp]) -> None:
        index = _Index(
            stamps=stamps,
            shifts_ns=[journal.shift_ns for journal in self.journals],
            zones=self.zones,
            spans=list(self.spans.values()),
            steps=dict(self.steps),
            unnumbered=self._unnumbered,
            before=dict(self._before),
            attempts=self.attempts.starts,
            trainers=sorted(self.attempts.trainers),
            first_steps=sorted(self.attempts.first_steps),
            left_out=[(*where, count) for where, count in self.reader.left_out.items()],
            beyond=dict(self._distinct.beyond),
            kinds=self.kinds,
        )
        cache.put(run, INDEX, index, Union.pieces)

    def notes(self) -> list[str]:
        """Return a note for each journal and reason with left-out lines; if there are many, for the first ones."""
        notes = [f"{file}: it can't be read: {reason}" for file, reason in sorted(self.reader.failed.items())] + [
            f"{file}: {several(count, 'line')} left out: {reason}"
            for (file, reason), count in sorted(self.reader.left_out.items())
        ]
        for what, effect in (("name", "merged into one name"), ("role", "merged into one role"), ("step", "left out")):
            if count := self._distinct.beyond[what]:
                spans = several(count, "span")
                notes.insert(0, f"{spans} {effect}: only the first {MAX_DISTINCT[what]} {what}s are distinguished")
        more = notes[_MAX_NOTES:]
        return notes[:_MAX_NOTES] + ([f"and {several(len(more), 'more such note')} of other files"] if more else [])
