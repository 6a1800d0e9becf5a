"""The timeline of a run: sums of each step, computed from the journals of all processes.

Only sums are kept, because a large run has millions of spans. The zones of the journals are kept too: they show which
parts of the journals contain the spans of a step. So little must be read to show a step in detail. The cache of a large
run contains sums and zones, until a journal changes.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct

from autoprof.base.intervals import Interval, Union
from autoprof.config import values
from autoprof.report.model import PROFILING, listed, several
from autoprof.rundir import layout
from autoprof.rundir.journal import (
    EVER,
    INDEX,
    WHOLE_FILE,
    Journal,
    JournalIndex,
    SpanReader,
    Zone,
    journal_stamps,
    journals,
    ranges,
)
from autoprof.rundir.layout import Stamp
from autoprof.rundir.records import EXPORT, HAND_OVER, Line
from autoprof.traces import clocks
from autoprof.traces.clocks import NO_PROGRAMS, Attempts, TrainerLoop
from autoprof.traces.event_rows import OTHER_NAMES
from autoprof.traces.reader import TraceError

# Name of verl's timer around the whole step.
WHOLE = "step"
# A step number that no zone of a journal contains.
NO_STEP = 2 * EVER
# Kinds of spans that may count tokens. Only the first one that does is used, because they contain each other.
TOKEN_KINDS = "turn", "request", "sample", "stage"
# Number that replaces the number of the driver's journal if the step's driver is unknown.
NO_FILE = -1
# Maximum number of distinct names of spans, roles and steps. Some programs put a number into every name, and the page
# grows with each name.
MAX_DISTINCT = {"name": 1_000, "role": 200, "step": 100_000}
# Maximum number of notes on journal lines that were left out. A large run has thousands of journals.
_MAX_NOTES = 20


def journals_of(run: Path) -> tuple[list[Journal], list[str]]:
    """Return the journals of a run, each with the shift of its clock, and notes on clocks that are not corrected."""
    files = journals(run)
    hosts = {file.host for file in files}
    if len(hosts) < 2:
        return files, []
    try:
        measured_clocks = clocks.read_offsets(run)
    except (TraceError, OSError) as error:
        return files, [f"clocks of {len(hosts)} hosts are not corrected; their own settings are used: {error}"]
    # One offset per host, from the best measurement, is precise enough: a report shows seconds.
    best_offsets = {
        host: min(offsets, key=lambda offset: offset.error_ns) for host, offsets in measured_clocks.offsets.items()
    }
    shifted_files = [
        msgspec.structs.replace(file, shift_ns=-best_offsets[file.host].offset_ns)
        if file.host in best_offsets
        else file
        for file in files
    ]
    unmeasured_hosts = sorted(hosts - best_offsets.keys() - {measured_clocks.driver})
    if len(unmeasured_hosts) > 1:
        return shifted_files, [f"clocks of {listed(unmeasured_hosts)} were not measured; their own settings are used"]
    return shifted_files, [
        f"the clock of {host} was not measured; its own setting is used" for host in unmeasured_hosts
    ]


# Name, start in ns, end in ns, and the number of the journal.
Timer = tuple[str, int, int, int]


class Distinct:
    """Limit for the distinct names, roles and steps: the first `MAX_DISTINCT` values of each are accepted.

    Attributes:
        beyond: The number of spans with a name, role or step that was not accepted, by `name`, `role` or `step`.
    """

    def __init__(self) -> None:
        self._first: dict[str, set[str | int]] = {"name": set(), "role": set(), "step": set()}
        self.beyond: Counter[str] = Counter()

    def has(self, what: str, value: str | int) -> bool:
        """Return True if a value is accepted. If it is not accepted, count it in `beyond` and return False.

        Args:
            what: `name`, `role` or `step`.
            value: The name, the role or the number of the step.
        """
        accepted_values = self._first[what]
        if value not in accepted_values:
            if len(accepted_values) >= MAX_DISTINCT[what]:
                self.beyond[what] += 1
                return False
            accepted_values.add(value)
        return True

    def span(self, span: Line, shift_ns: int) -> Line | None:
        """Return a span with accepted names and with times on the clock of the driver's host.

        A name or role that is not accepted is replaced by `OTHER_NAMES`. Return None if the time of the span is not
        valid, or if the step is not accepted.
        """
        if not 0 < span.start_ns <= span.end_ns or (span.step is not None and not self.has("step", span.step)):
            return None
        unknown_fields = [what for what in ("name", "role") if not self.has(what, getattr(span, what))]
        changes: dict[str, str | int] = dict.fromkeys(unknown_fields, OTHER_NAMES)
        if shift_ns:
            changes |= {"start_ns": span.start_ns + shift_ns, "end_ns": span.end_ns + shift_ns}
        return msgspec.structs.replace(span, **changes) if changes else span


class StepSpan(Struct, frozen=True, gc=False):
    """The span of a step, as the driver of the step recorded it.

    If several processes recorded the same step, the one with the highest `priority` counts.

    Attributes:
        number: The number of the step.
        file: The number of the driver's journal.
        start_ns: The start of the step, on the clock of the driver's host.
        end_ns: The end of the step, on the clock of the driver's host.
        role: The role of the driver.
        rank: The rank of the driver.
        error: The type of the exception that ended the step.
        since_ns: The start of the step's last execution, or an earlier time. Journal lines with the step's number that
            end before belong to an earlier execution.
        until_ns: The end of the attempt that executed the step.
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

    @property
    def priority(self) -> tuple[bool, bool, int]:
        """Return a key for comparison: first the span of a trainer, then of rank 0, then the span that began later."""
        return self.role == "trainer", not self.rank, self.start_ns


class StepSums(Struct):
    """Sums of one step.

    Attributes:
        timers: The timers of all processes.
        stages: Dict from the name of each stage to the times in which any process ran the stage.
        profiling: The times of the step in which autoprof delayed the run. `RunTimeline` sets them once all journals
            are read, because an export may end in a later step.
        tokens: Dict from the kind of span, one of `TOKEN_KINDS`, to (prompt tokens, response tokens).
        samples: The number of samples.
        trains: True if a span of the step does not belong to a validation. A validation before the first step has the
            number of the step before.
        first_ns: The start of the first span with the step's number. The span of the step itself does not count.
        last_ns: The last end of a span with the step's number. The span of the step itself does not count.
        first_ranks: The same as `stages`, for processes with rank 0 of their role only.
        files: Dict from the name of each stage to the number of the journal of a process with rank 0.
        beside: The same as `stages`, for stages in another thread or task than their step. In an ended step also for
            stages without a step's number, and for stages beside an earlier step that have not ended before.
    """

    timers: list[Timer] = []
    stages: dict[str, Union] = {}
    profiling: Union = msgspec.field(default_factory=Union)
    tokens: dict[str, tuple[float, float]] = {}
    samples: int = 0
    trains: bool = False
    first_ns: int = EVER
    last_ns: int = 0
    first_ranks: dict[str, Union] = {}
    files: dict[str, int] = {}
    beside: dict[str, Union] = {}

    @property
    def driver(self) -> int:
        """Return the number of the journal with the timer that ended last. Return `NO_FILE` if there are no timers."""
        return max(self.timers, key=lambda timer: timer[2], default=("", 0, 0, NO_FILE))[3]


class _Export(NamedTuple):
    """An export of a trace.

    Attributes:
        step: The number of the captured step.
        start_ns: The start of the export.
        end_ns: The end of the export.
        in_work: The times of the export in which the same process ran a stage or a step.
    """

    step: int
    start_ns: int
    end_ns: int
    in_work: list[Interval]


class _Index(JournalIndex):
    """The cached attributes of a `RunTimeline`."""

    spans: list[StepSpan]
    steps: dict[int, StepSums]
    unnumbered: list[Timer]
    stepless: dict[str, Union]
    validations: list[Timer]
    before: dict[int, list[int]]
    first_steps: list[int]
    left_out: list[tuple[str, str, int]]
    beyond: dict[str, int]
    kinds: dict[str, str]
    profiling: Union
    writing: Union


class RunTimeline:
    """Sums of all steps of a run.

    Each journal is read once. Steps that ran again after the run was resumed are read a second time.

    Attributes:
        journals: The journals of the run. The number of a journal is its index in this list.
        spans: The spans of the steps that have ended, by the number of the step.
        steps: The sums of all steps, by the number of the step.
        between: Dict from the number of each step to (start, end) in ns. Journal lines with the step's number in this
            time belong to the last execution of the step.
        validations: The validations of trainers outside of steps: name, start, end and the number of the journal.
        attempts: The attempts and loops of the run.
        zones: The zones of each journal, in the order of `journals`.
        kinds: The kinds of stages, by the name of the stage, if the name does not show the kind.
        profiling: The times in which autoprof delayed the run: a process started or stopped a recording, waited for a
            file, or exported a trace (`_count_exports`).
        writing: The part of `profiling` in which processes exported traces.
        reader: The reader of the journals. It has counted the journal lines that were left out.
    """

    def __init__(
        self, journals: Sequence[Journal], run: Path | None = None, programs: Mapping[int, str] = NO_PROGRAMS
    ) -> None:
        """Read the journals.

        Args:
            journals: The journals of the run.
            run: The directory of the run, whose cache is used. None to use no cache.
            programs: Dict from the number of a journal to the command of its process, as in `Attempts.finish`.
        """
        self.attempts = Attempts()
        self._begin(journals)
        stamps = journal_stamps(journals)
        cached = run is not None and layout.is_large(stamps)
        if not (run and cached and self._read_index(run, stamps)):
            for number in range(len(journals)):
                self.zones.append(self._read_journal(number))
            self.attempts.finish(programs)
            self._count_exports()
            if run and cached and not self.reader.failed:
                self._write_index(run, stamps)
        self._finish()

    def of_loop(self, loop: int) -> RunTimeline:
        """Return the timeline of one loop: only the spans that began in the periods of this loop.

        The parts of the journals with these spans are read again.
        """
        timeline = copy.copy(self)
        timeline._begin(self.journals)
        timeline._periods = self.attempts.periods(loop)
        periods = [(NO_STEP, since, until) for since, until in timeline._periods]
        for number, zones in enumerate(self.zones):
            timeline._read_journal(number, ranges(zones, periods))
        timeline._count_exports()
        timeline.zones = self.zones
        timeline._finish()
        return timeline

    @property
    def repeated(self) -> list[int]:
        """Return the numbers of the steps that the trainer executed several times."""
        return sorted(number for number, ends in self._before.items() if ends)

    def _begin(self, journals: Sequence[Journal]) -> None:
        """Set all sums to the state before any journal is read."""
        self.journals = journals
        self.spans: dict[int, StepSpan] = {}
        self.steps: dict[int, StepSums] = defaultdict(StepSums)
        self.zones: list[list[Zone]] = []
        self.kinds: dict[str, str] = {}
        self.profiling, self.writing = Union(), Union()
        self._exports: list[_Export] = []
        self.validations: list[Timer] = []
        # The periods whose spans are counted, or an empty list to count all spans.
        self._periods: list[tuple[int, int]] = []
        self.reader = SpanReader()
        self._distinct = Distinct()
        self._unnumbered: list[Timer] = []
        # Dict from the name of a stage to the times in which processes that know no step ran it.
        self._stepless: dict[str, Union] = {}
        # Dict from the number of a step that the trainer executed several times to the ends of its earlier executions.
        self._before: dict[int, list[int]] = defaultdict(list)

    def _finish(self) -> None:
        """Correct the sums after all journals were read."""
        self.between = {number: self._time_range_of_step(number) for number in self.spans.keys() | self.steps.keys()}
        self._leave_out_earlier_runs()
        self._number_timers()
        for number in self.between:
            sums, ended_span = self.steps[number], self.spans.get(number)
            limits = (ended_span.start_ns, ended_span.end_ns) if ended_span else (sums.first_ns, sums.last_ns)
            sums.profiling = Union(self.profiling.within(*limits))
        self._extend_stages_beside()
        self.spans = {
            number: msgspec.structs.replace(span, since_ns=self.between[number][0], until_ns=self.between[number][1])
            for number, span in self.spans.items()
        }

    def _extend_stages_beside(self) -> None:
        """Add stages without a step's number, and stages that began in an earlier step, to `beside` of each step."""
        carried: list[tuple[str, Union]] = []
        for span in sorted(self.spans.values(), key=lambda span: span.start_ns):
            beside = self.steps[span.number].beside
            own = list(beside.items())
            for name, union in (*self._stepless.items(), *carried):
                for piece in union.within(span.start_ns, span.end_ns):
                    beside.setdefault(name, Union()).add(*piece)
            carried = [each for each in (*carried, *own) if each[1].within(span.end_ns, EVER)]

    def _read_journal(self, file: int, parts: Sequence[tuple[int, int]] = WHOLE_FILE) -> list[Zone]:
        """Add the spans of the journal with the number `file` to the sums. Return the zones of the journal.

        `parts` are the parts to read, as in `SpanReader.batches`.
        """
        journal = self.journals[file]
        shift, zones = journal.shift_ns, []
        work: list[Interval] = []
        exports: list[tuple[int, int, int]] = []
        for batch in self.reader.batches(journal, parts):
            zone = Zone(batch.begin)
            zones.append(zone)
            # The samples of a step may be written after its spans.
            for samples in batch.stacks:
                zone.start_ns = min(zone.start_ns, samples.unix_ns + shift)
                zone.end_ns = max(zone.end_ns, samples.until_ns + shift)
            sums, current_step = None, None
            for span in batch.spans:
                start, end, number = span.start_ns + shift, span.end_ns + shift, span.step
                if not 0 < span.start_ns <= span.end_ns:
                    self.reader.left_out[journal.name, "without a time"] += 1
                    continue
                if self._periods and not any(since <= start < until for since, until in self._periods):
                    continue
                if start < zone.start_ns:
                    zone.start_ns = start
                if end > zone.end_ns:
                    zone.end_ns = end
                if not self._periods and (span.role == "trainer" or span.kind == "step"):
                    self.attempts.add(file, span, start, end)
                if span.kind in ("stage", "step"):
                    work.append((start, end))
                elif span.kind == PROFILING and span.name == EXPORT:
                    exports.append((number or 0, start, end))
                elif span.kind == PROFILING and span.name != HAND_OVER:
                    self.profiling.add(start, end)
                if number is None:
                    if span.kind == "timer":
                        self._unnumbered.append((self._name(span), start, end, file))
                    elif span.kind == "stage":
                        self._stepless.setdefault(self._name(span), Union()).add(start, end)
                    if span.kind != "timer" and span.stage_kind == "validate" and not span.rank:
                        self.validations.append((self._name(span), start, end, file))
                    continue
                if number != current_step or sums is None:
                    if number not in self.steps and not self._distinct.has("step", number):
                        continue
                    current_step, sums = number, self.steps[number]
                    zone.first_step, zone.last_step = min(zone.first_step, number), max(zone.last_step, number)
                self._add_span(file, span, sums, start, end)
        if exports:
            own_work = Union(work)
            self._exports += [_Export(*export, own_work.within(*export[1:])) for export in exports]
        return zones

    def _count_exports(self) -> None:
        """Add the exports to `profiling`, except the times in which an export delays no process.

        torch's export holds the interpreter's lock, so a stage or step of the same process stands still. Another
        process waits for the result of the exporting process, unless it begins a stage after the export began. The
        hand-over holds the lock for about 20 ms, so it does not count.
        """
        for export in self._exports:
            steps = [self.steps[step] for step in range(export.step, export.step + 3) if step in self.steps]
            later_stages = Union(
                piece
                for sums in steps
                for stage in sums.stages.values()
                for piece in stage.within(export.start_ns, export.end_ns)
                if piece[0] > export.start_ns
            )
            for piece in (*export.in_work, *later_stages.without(export.start_ns, export.end_ns)):
                self.profiling.add(*piece)
                self.writing.add(*piece)
        self._exports.clear()

    def _add_span(self, file: int, span: Line, sums: StepSums, start: int, end: int) -> None:
        """Add a span that has a step's number to the sums of this step.

        Args:
            file: The number of the journal that contains the span.
            span: The span to add.
            sums: The sums of the step.
            start: The start of the span, on the clock of the driver's host.
            end: The end of the span, on the clock of the driver's host.
        """
        kind, name = span.kind, span.name
        if kind == "step":
            self._count_span(StepSpan(span.step or 0, file, start, end, span.role, span.rank, span.error))
            return
        if kind == "timer" and name == WHOLE:
            return
        if not (sums.trains or span.ids.get("validate")):
            sums.trains = True
        if start < sums.first_ns:
            sums.first_ns = start
        if end > sums.last_ns:
            sums.last_ns = end
        if kind == "stage":
            stages = sums.beside if span.beside else sums.stages
            stage = stages.get(name)
            if stage is None:
                name = self._name(span)
                stage = stages.setdefault(name, Union())
            stage.add(start, end)
            if not span.rank and not span.beside:
                sums.first_ranks.setdefault(name, Union()).add(start, end)
                sums.files[name] = file
        elif kind == "timer":
            sums.timers.append((self._name(span), start, end, file))
        elif kind == "sample":
            sums.samples += not span.ids.get("validate")
        is_counted = kind in TOKEN_KINDS and (kind != "stage" or span.stage_kind == "generate")
        if is_counted and "response_tokens" in span.counts and not span.ids.get("validate"):
            prompt, response = sums.tokens.get(kind, (0, 0))
            added_tokens = span.counts.get("prompt_tokens") or 0, span.counts.get("response_tokens") or 0
            sums.tokens[kind] = prompt + added_tokens[0], response + added_tokens[1]

    def _name(self, span: Line) -> str:
        """Return the name of a stage or timer, or `OTHER_NAMES`. If the name does not show the kind, store the kind."""
        if not self._distinct.has("name", span.name):
            return OTHER_NAMES
        if span.stage_kind and values.kind_of(span.name) != span.stage_kind:
            self.kinds[span.name] = span.stage_kind
        return span.name

    def _count_span(self, span: StepSpan) -> None:
        other_span = self.spans.setdefault(span.number, span)
        if other_span is span:
            return
        worse_span, self.spans[span.number] = sorted((span, other_span), key=lambda each: each.priority)
        # If the other span is also of a trainer's rank 0, then the trainer executed the step several times.
        if worse_span.role == "trainer" and not worse_span.rank:
            self._before[span.number].append(worse_span.end_ns)

    def _time_range_of_step(self, number: int) -> tuple[int, int]:
        span = self.spans.get(number)
        if span is None:
            # The step has not ended. Use the attempt to which the step's last line belongs.
            return self.attempts.around(self.steps[number].last_ns - 1)
        since, until = self.attempts.around(span.start_ns)
        return max([since, *(end for end in self._before[number] if end <= span.start_ns)]), until

    def _leave_out_earlier_runs(self) -> None:
        """Correct the sums of the steps that were executed several times, so that they contain the last execution only.

        The lines of these steps are read again.
        """
        repeated_steps = {
            number
            for number, sums in self.steps.items()
            if sums.first_ns < self.between[number][0] or sums.last_ns > self.between[number][1]
        }
        if not repeated_steps:
            return
        for number in repeated_steps:
            self.steps[number] = StepSums()
        reader, steps = SpanReader(), [(number, 0, 0) for number in repeated_steps]
        for file, journal in enumerate(self.journals):
            shift = journal.shift_ns
            for batch in reader.batches(journal, ranges(self.zones[file], steps)):
                for span in batch.spans:
                    if span.step is None or span.step not in repeated_steps or span.kind == "step":
                        continue
                    start, end = span.start_ns + shift, span.end_ns + shift
                    since, until = self.between[span.step]
                    if 0 < span.start_ns <= span.end_ns and end > since and start < until:
                        self._add_span(file, span, self.steps[span.step], start, end)

    def _number_timers(self) -> None:
        """Add each timer without a step number to the step in which the middle of the timer lies."""
        order = sorted(self.spans.values(), key=lambda span: span.start_ns)
        starts = [span.start_ns for span in order]
        for timer in self._unnumbered:
            middle = (timer[1] + timer[2]) // 2
            index = bisect_right(starts, middle) - 1
            if index >= 0 and middle < order[index].end_ns:
                self.steps[order[index].number].timers.append(timer)
        self._unnumbered.clear()

    def _read_index(self, run: Path, stamps: dict[str, Stamp]) -> bool:
        """Take over the cached sums. Return False if they don't match the present state of the journals, else True."""
        index = layout.get_cached(run, INDEX, _Index, lambda _, pieces: Union(pieces))
        shifts = [journal.shift_ns for journal in self.journals]
        if index is None or index.stamps != stamps or index.shifts_ns != shifts or len(index.zones) != len(shifts):
            return False
        self.zones, self.kinds, self._unnumbered = index.zones, index.kinds, index.unnumbered
        self._stepless = index.stepless
        self.profiling, self.writing = index.profiling, index.writing
        self.spans = {span.number: span for span in index.spans}
        self.steps.update(index.steps)
        self._before.update(index.before)
        self.validations = index.validations
        self.attempts.starts, self.attempts.first_steps = index.attempts, set(index.first_steps)
        self.attempts.loop_of = index.loop_of
        self.attempts.loops = {number: TrainerLoop(*loop) for number, loop in index.loops.items()}
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
            stepless=self._stepless,
            before=dict(self._before),
            attempts=self.attempts.starts,
            loop_of=self.attempts.loop_of,
            loops={number: (loop.trainer, loop.on_disk) for number, loop in self.attempts.loops.items()},
            validations=self.validations,
            trainers=sorted(self.attempts.trainers),
            first_steps=sorted(self.attempts.first_steps),
            left_out=[(*where, count) for where, count in self.reader.left_out.items()],
            beyond=dict(self._distinct.beyond),
            kinds=self.kinds,
            profiling=self.profiling,
            writing=self.writing,
        )
        layout.put_cached(run, INDEX, index, Union.pieces)

    def notes(self) -> list[str]:
        """Return notes on journals that can't be read, on journal lines that were left out, and on merged names.

        At most `_MAX_NOTES` notes are returned, and a last note with the number of the omitted notes.
        """
        notes = [f"{file}: it can't be read: {reason}" for file, reason in sorted(self.reader.failed.items())] + [
            f"{file}: {several(count, 'line')} left out: {reason}"
            for (file, reason), count in sorted(self.reader.left_out.items())
        ]
        for what, effect in (("name", "merged into one name"), ("role", "merged into one role"), ("step", "left out")):
            if count := self._distinct.beyond[what]:
                spans = several(count, "span")
                notes.insert(0, f"{spans} {effect}: only the first {MAX_DISTINCT[what]} {what}s are distinguished")
        omitted_notes = notes[_MAX_NOTES:]
        return notes[:_MAX_NOTES] + (
            [f"and {several(len(omitted_notes), 'more such note')} of other files"] if omitted_notes else []
        )
