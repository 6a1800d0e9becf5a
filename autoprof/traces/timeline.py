"""Timeline of one step: its spans from the journals of all processes, and these spans as events of a trace."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import msgspec
from msgspec import Raw

from autoprof.rundir import journal, layout, processes, runs
from autoprof.rundir.journal import EVER, Journal, JournalIndex, SpanReader
from autoprof.rundir.records import Line
from autoprof.rundir.runs import Run
from autoprof.traces.clocks import Attempts, TrainerLoop, is_of, programs_of
from autoprof.traces.rewrite import ProcessGroup, RewrittenEvent, Tally, lay_out, microseconds

# Maximum number of spans of a step that are kept. No viewer shows more.
MAX_SPANS = 500_000
# A step number that no zone of a journal contains.
NO_STEP = 2 * EVER
# Suffix that is added to the names of open spans.
OPEN = "(open)"
_STEP, _TRAINER = "step", "trainer"


def _open_spans(run: Path) -> dict[str, list[Line]]:
    """Return the open spans of a run, as a dict from the name of each journal to its open spans.

    The last sign of life of the process becomes the end of its open spans.
    """
    run_state = runs.read(run)
    states = run_state.processes
    process_ends = processes.ends(states, run_state.state.startswith("running"), time.time_ns())
    return {
        state.file: [
            Line(
                **msgspec.structs.asdict(span)
                | {"name": f"{span.name} {OPEN}", "end_ns": max(span.start_ns, end)}
                | {"ids": {**span.ids, "open": state.state}}
            )
            for span in state.spans
        ]
        for state, end in zip(states, process_ends, strict=True)
        if state.spans
    }


def _index(run: Path, files: list[Journal]) -> JournalIndex | None:
    """Return the cached index of a run's journals.

    Return None if the index is not current, or if it lacks spans of steps. Also return None if the clock of a trainer's
    host was corrected: `spans_of_step` compares the starts of attempts with uncorrected times.
    """
    index = layout.get_cached(run, journal.INDEX, JournalIndex)
    if index is None or index.stamps != journal.journal_stamps(files) or len(index.zones) != len(files):
        return None
    return None if index.beyond.get("step") or any(index.shifts_ns[trainer] for trainer in index.trainers) else index


def attempts_of(run: Run) -> Attempts:
    """Return the attempts and loops of a run."""
    files = [file for file in journal.journals(run.path) if file.path.is_file()]
    index = _index(Path(run.path), files)
    attempts = Attempts()
    if index is not None:
        attempts.starts, attempts.loop_of = index.attempts, index.loop_of
        attempts.loops = {number: TrainerLoop(*loop) for number, loop in index.loops.items()}
        return attempts
    for place, file in enumerate(files):
        for span in journal.search(file, (b'"role":"trainer"',)):
            attempts.add(place, span, span.start_ns, span.end_ns)
    attempts.finish(programs_of(run, files))
    return attempts


def spans_of_step(
    run: Path, number: int, messages: list[str] | None = None, periods: Sequence[tuple[int, int]] = ((0, EVER),)
) -> dict[Journal, list[Line]]:
    """Return the spans of a step, as a dict from each journal to its spans.

    The spans of a step are the spans with the number of the step, and the spans without a number that begin during the
    step. If the step ran again after the run was resumed, only the spans of its last execution are returned. At most
    `MAX_SPANS` spans are returned.

    Args:
        run: The directory of the run.
        number: The number of the step.
        messages: A list. If spans are left out, a message about them is appended.
        periods: The periods of the step's loop, as in `Attempts.periods`. Spans that begin outside are left out.
    """
    files = [file for file in journal.journals(run) if file.path.is_file()]
    index = _index(run, files)
    attempts = Attempts()
    open_spans = _open_spans(run)

    def ended_spans(place: int, file: Journal, texts: Sequence[bytes], step: tuple[int, int, int]) -> Iterator[Line]:
        """Yield the ended spans whose lines contain one of the texts. With an index, yield all spans near the step."""
        if index is None:
            yield from journal.search(file, texts)
            return
        for batch in SpanReader().batches(file, journal.ranges(index.zones[place], [step])):
            yield from (span for span in batch.spans if 0 < span.start_ns <= span.end_ns)

    # The clocks of hosts are not corrected here: all spans are compared with the driver's step by uncorrected times.
    with_number: list[tuple[Journal, Line]] = []
    for place, file in enumerate(files):
        for span in ended_spans(place, file, (b'"step":%d,' % number, b'"role":"trainer"'), (number, 0, 0)):
            if index is None:
                attempts.add(place, span, span.start_ns, span.end_ns)
            if span.step == number and _is_in(span, periods):
                with_number.append((file, span))
        with_number += [
            (file, span) for span in open_spans.get(file.name, ()) if span.step == number and _is_in(span, periods)
        ]
    attempts.finish()
    if index is not None:
        attempts.starts = index.attempts
    if not with_number:
        return {}
    *_, last_ns = max((span.kind == _STEP, span.role == _TRAINER, span.start_ns) for _, span in with_number)
    attempt_start, attempt_end = attempts.around(last_ns)
    attempt_spans = [(file, span) for file, span in with_number if is_of(span, attempt_start, attempt_end)]
    steps = [span for _, span in attempt_spans if span.kind == _STEP] or [span for _, span in with_number]
    start, end = min(span.start_ns for span in steps), max(span.end_ns for span in steps)
    shifts = index.shifts_ns if index is not None else [0] * len(files)
    without_number = (
        (file, span)
        for place, (file, shift) in enumerate(zip(files, shifts, strict=True))
        for span in (
            *ended_spans(place, file, (b'"step":null',), (NO_STEP, start - 1 + shift, end + 1 + shift)),
            *open_spans.get(file.name, ()),
        )
        if span.step is None and start <= span.start_ns <= end
    )
    by_process: dict[Journal, list[Line]] = {}
    span_count = 0
    for file, span in itertools.chain(attempt_spans, without_number):
        span_count += 1
        if span_count <= MAX_SPANS:
            by_process.setdefault(file, []).append(span)
    if span_count > MAX_SPANS and messages is not None:
        messages.append(f"{span_count - MAX_SPANS} spans of the timeline left out: the step has more than {MAX_SPANS}")
    return by_process


def _is_in(span: Line, periods: Sequence[tuple[int, int]]) -> bool:
    return any(since <= span.start_ns < until for since, until in periods)


_encode = msgspec.json.Encoder().encode


# The spans of a step by the journal of each process. The `shift_ns` of a journal is added to the times of its spans.
Timeline: TypeAlias = Mapping[Journal, Sequence[Line]]
NO_SPANS: Timeline = {}


# Number that is added to the numbers of the timeline's further tracks. It is larger than the id of any thread of Linux.
_FIRST_TRACK = 6_000_000


def draw(
    timeline: Timeline, groups: Mapping[Journal, ProcessGroup], base_ns: int, write: Callable[[bytes], object]
) -> Tally:
    """Write the spans of a timeline as events in JSON, separated by commas. Viewers show them before the threads.

    Args:
        timeline: The spans to write.
        groups: The group of each process.
        base_ns: The base of the times to write, in ns since the epoch.
        write: Function that is called with the events of each process.
    """
    tally = Tally()
    for process, spans in sorted(timeline.items(), key=lambda item: groups[item[0]].number):
        shift_ns = process.shift_ns - base_ns
        pid = groups[process].pid(0)
        events = groups[process].descriptions(0)
        for number, lane in enumerate(lay_out(spans), 1):
            # Perfetto shows a process's main thread first, and takes the thread with the id of the process for it.
            track_id = Raw(b"%d" % (pid if number == 1 else _FIRST_TRACK + number))
            for event_name, arguments in (
                ("thread_name", {"name": lane.name}),
                ("thread_sort_index", {"sort_index": number}),
            ):
                args = Raw(_encode(arguments))
                events.append(RewrittenEvent(ph="M", name=Raw(_encode(event_name)), pid=pid, tid=track_id, args=args))
            events += [_event(span, pid, track_id, shift_ns) for span in lane.spans]
        text = (b",\n" if tally.events else b"") + _encode(events)[1:-1]
        tally.events += len(events)
        tally.bytes += len(text)
        write(text)
    return tally


def _event(span: Line, pid: int, tid: Raw, shift_ns: int) -> RewrittenEvent:
    fields = {"role": span.role, "rank": span.rank, "step": span.step, "error": span.error, **span.ids, **span.counts}
    arguments = {name: value for name, value in fields.items() if value not in (None, "")}
    return RewrittenEvent(
        ph="X",
        cat=Raw(_encode(span.kind)),
        name=Raw(_encode(span.name)),
        pid=pid,
        tid=tid,
        ts=microseconds(span.start_ns + shift_ns),
        dur=microseconds(span.end_ns - span.start_ns),
        args=Raw(_encode(arguments)),
    )
