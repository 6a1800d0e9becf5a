"""Writer of a process's timeline, `timeline/<host>-<pid>.jsonl`: one line per span.

Steps, stages and windows are written when they begin and when they end. The spans of samples, which may be thousands in
a step, are buffered for at most a second or until a span of another kind is written. A line is written whole or not at
all. Exceptions are written with the innermost step or stage that they left.
"""

from __future__ import annotations

import asyncio
from _thread import get_ident
from collections import Counter, deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeAlias
from weakref import WeakSet

import msgspec

from autoprof import __version__
from autoprof.base import files, identity, interrupts, log, process
from autoprof.base.exceptions import type_name
from autoprof.base.originals import os, threading, time
from autoprof.config import kinds
from autoprof.run import raised
from autoprof.rundir import memory_state
from autoprof.rundir.layout import RunDir
from autoprof.rundir.records import (
    BegunLine,
    DroppedLine,
    ExitLine,
    Id,
    Line,
    MemoryLine,
    MemoryState,
    Moment,
    ProcessLine,
    RaisedLine,
)

# Kinds of spans that are rare and are written immediately. All others are buffered.
AT_ONCE = ("step", "stage", "window")
# Kinds of spans that have a stage kind. Without an explicit one, it follows from a well-known name.
_STAGES = ("stage", "timer")


class SpanWriter(Protocol):
    """The members of a timeline that spans use; `Timeline` documents them."""

    life: object
    running: set[Span]
    announced: set[Span]

    def begun(self, span: Span) -> None: ...

    def note(self, kind: str, name: str, took_ns: int) -> None: ...

    def raised(self, line: Line, error: BaseException) -> None: ...

    def add(self, line: Line, now: int, *, at_once: bool = False) -> None: ...

    def write(self, line: BegunLine | DroppedLine) -> None: ...


class Span:
    """A span that begins when the object is created. `end` writes it.

    Args:
        timeline: The timeline to write to.
        kind: The kind of the span.
        name: Its name.
        step: The global step, or None if unknown.
        role: The role.
        rank: The rank, or None.
        ids: The ids of its sample or request.
        stage_kind: The kind of the stage; None to derive it from the name.

    Attributes:
        thread: The thread in which the span began. Only spans of the kinds in `AT_ONCE` have it.
    """

    __slots__ = (
        "_begun",
        "_ids",
        "_kind",
        "_life",
        "_name",
        "_rank",
        "_role",
        "_stage_kind",
        "_start",
        "_step",
        "_timeline",
        "thread",
    )

    def __init__(
        self,
        timeline: SpanWriter,
        kind: str,
        name: str,
        *,
        step: int | None,
        role: str,
        rank: int | None,
        ids: Mapping[str, Id] | None = None,
        stage_kind: str | None = None,
    ) -> None:
        self._timeline = timeline
        self._life = timeline.life
        self._kind, self._name, self._step, self._role, self._rank = kind, name, step, role, rank
        self._ids = ids or {}
        self._stage_kind = stage_kind
        self._start = time.time_ns()
        self._begun = time.monotonic_ns()
        if kind in AT_ONCE:
            self.thread = get_ident()
            timeline.begun(self)

    @property
    def line(self) -> BegunLine:
        """Return the `begun` line of the span."""
        return BegunLine(
            self._kind,
            self._name,
            self._step,
            self._role,
            self._rank,
            self._start,
            self._ids,
            self._known_kind() if self._kind in _STAGES else "",
        )

    @property
    def kind(self) -> str:
        """Return its kind."""
        return self._kind

    @property
    def begun_ns(self) -> int:
        """Return the start by `time.monotonic_ns`."""
        return self._begun

    def _known_kind(self) -> str:
        return kinds.of(self._name) if self._stage_kind is None else self._stage_kind

    def end(
        self,
        error: BaseException | None = None,
        counts: Mapping[str, int] | None = None,
        *,
        step: int | None = None,
        at_ns: int | None = None,
    ) -> None:
        """Write the span. In a forked child do nothing, because the parent writes it. Never raises.

        Args:
            error: The exception that ended the span.
            counts: Counts of the span, such as tokens.
            step: The step, if it was unknown at the start.
            at_ns: The end by `time.monotonic_ns`; None for now.
        """
        now = time.monotonic_ns() if at_ns is None else at_ns
        timeline = self._timeline
        if self._life is not timeline.life:
            return
        stage_kind = self._stage_kind
        if stage_kind is None:
            stage_kind = kinds.of(self._name) if self._kind in _STAGES else ""
        timeline.announced.discard(self)
        line = Line(
            self._kind,
            self._name,
            self._step if step is None else step,
            self._role,
            self._rank,
            self._start,
            # The end comes from the monotonic clock, because the wall clock may be set meanwhile.
            self._start + now - self._begun,
            None if error is None else type_name(error),
            self._ids,
            counts or {},
            stage_kind,
        )
        if self._kind in AT_ONCE:
            if error is None:
                timeline.note(self._kind, self._name, now - self._begun)
            else:
                timeline.raised(line, error)
            timeline.add(line, now, at_once=True)
        else:
            timeline.running.discard(self)
            if error is not None:
                timeline.raised(line, error)
            timeline.add(line, now)

    def drop(self) -> None:
        """Omit the span from the timeline."""
        timeline = self._timeline
        timeline.running.discard(self)
        if self in timeline.announced:
            timeline.announced.discard(self)
            timeline.write(DroppedLine(self._kind, self._name, self._start))


AnyLine: TypeAlias = Line | BegunLine | DroppedLine | ExitLine | RaisedLine | MemoryLine


class TimelineFile:
    """The timeline file. It is made when the first lines are written.

    Attributes:
        run: The run directory.
        path: The path of the file; empty before it is made.
        size: The bytes written since the caller last set this to 0.
        memory: The memory of this process, compared with the last line.
    """

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.path = ""
        self.size = 0
        self.memory = memory_state.MemoryWatch()
        self._first = b""

    def append(self, lines: list[AnyLine]) -> None:
        """Append lines to the file.

        Raises:
            OSError: The lines can't be written.
        """
        content = _encoded(lines)
        self.size += len(content)
        if not self.path:
            path = self.run.process_file("timeline")
            self.run.make(path.parent)
            self._first = _process_line(self.memory.first())
            # An earlier process with the same pid may have written to the file: add a new process line.
            files.append(path, self._first + content)
            self.path = str(path)
            return
        try:
            files.append(self.path, content, self._first)
        except FileNotFoundError as error:  # the folder was removed
            interrupts.pass_on(error)
            self.run.make(Path(self.path).parent)
            files.append(self.path, content, self._first)


_encoder = msgspec.json.Encoder()


def _encoded(lines: list[AnyLine]) -> bytes:
    try:
        return _encoder.encode_lines(lines)
    except Exception as error:  # text with lone surrogates, such as file names that are not UTF-8
        interrupts.pass_on(error)
        return _encoder.encode_lines([_without_surrogates(msgspec.to_builtins(line)) for line in lines])


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_without_surrogates(name): _without_surrogates(inner) for name, inner in value.items()}
    return [_without_surrogates(inner) for inner in value] if isinstance(value, list) else value


def _process_line(memory: MemoryState) -> bytes:
    clock = Moment(time.time_ns(), time.monotonic_ns())
    pid = os.getpid()
    ticks = identity.start_ticks(pid) or 0
    line = ProcessLine(
        host=identity.HOST,
        pid=pid,
        clock=clock,
        version=__version__,
        ticks=ticks,
        namespace=identity.pid_namespace(),
        boot=identity.machine(),
        stderr=identity.own_stderr(),
        memory=memory,
    )
    return msgspec.json.encode(line) + b"\n"


# Exceptions that are not faults.
_NO_FAULT = (StopIteration, StopAsyncIteration, GeneratorExit, KeyboardInterrupt, asyncio.CancelledError)
# Number of lines for exceptions of stages per process.
_MAX_STAGE_LINES = 50
# Kinds of spans whose exceptions lose a sample. The exceptions of tools and turns may be caught.
_LOST = ("sample", "reward")
# Number of lines for exceptions of samples between two repetitions of the open spans: with one name and type, and all.
_MAX_ALIKE_LINES, _MAX_SAMPLE_LINES = 2, 20


class Exceptions:
    """Selection of the exceptions of one process that get a line. Several threads may use it."""

    def __init__(self) -> None:
        # The id of the last exception with a line and the start of the span that it left: for stages, and for samples.
        self._stage: tuple[int, int] = 0, 0
        self._lost: tuple[int, int] = 0, 0
        self._stages = self._samples = 0
        self._alike: Counter[tuple[str, str, str]] = Counter()

    def line(self, line: Line, error: BaseException) -> RaisedLine | None:
        """Return the line for an exception that leaves a span, or None if it gets none."""
        if issubclass(type(error), _NO_FAULT):
            return None
        if not (self._takes_sample if line.kind in _LOST else self._takes_stage)(line, error):
            return None
        return RaisedLine(time.time_ns(), line.kind, line.name, line.step, line.role, line.rank, raised.of(error))

    def again(self) -> None:
        """Reset the limits of samples, because readers look only at the end of a file."""
        self._alike.clear()
        self._samples = 0

    def _takes_stage(self, line: Line, error: BaseException) -> bool:
        if line.kind not in ("step", "stage", "window"):
            return False
        # The same exception in a span that began earlier: it is leaving the outer spans.
        known = self._stage[0] == id(error) and line.start_ns <= self._stage[1]
        self._stage = id(error), line.start_ns
        self._stages += line.kind != "step"
        return not known and (line.kind == "step" or self._stages <= _MAX_STAGE_LINES)

    def _takes_sample(self, line: Line, error: BaseException) -> bool:
        known = self._lost[0] == id(error) and line.start_ns <= self._lost[1]
        self._lost = id(error), line.start_ns
        key = line.kind, line.name, type_name(error)
        if known or self._alike[key] >= _MAX_ALIKE_LINES or self._samples >= _MAX_SAMPLE_LINES:
            return False
        self._alike[key] += 1
        self._samples += 1
        return True


# The buffer is written when it has this number of lines, or when its first line is this old.
_FLUSH_LINES = 256
_FLUSH_AFTER_NS = 1_000_000_000
# Maximum number of buffered lines, if the disk is too slow.
_MAX_LINES = 16 * _FLUSH_LINES
# In an idle process the buffer is written immediately, unless writing would take more than 1/20 of the time.
_MIN_IDLE_RATIO = 20
# Number of durations that are kept per name, and number of names.
_MAX_DURATIONS, _MAX_NAMES = 100, 256
# The start of a sample's span is written once the span is this old, for at most _MAX_OPEN spans.
_LONG_NS = 10_000_000_000
_MAX_OPEN = 256
# A process with an open span writes at least one line in this time, as a sign of life.
_MAX_SILENCE_NS = 30_000_000_000
# The starts of open spans are written again after this number of bytes, because readers read the end of a file.
REPEAT_AFTER_BYTES = 1 << 20


class Listener(Protocol):
    """Receiver of the ended spans of this process."""

    def hear(self, line: Line) -> None:
        """Process an ended span. Never raises."""


class Timeline:
    """The spans of one process. Any thread may add lines; the thread that finds the buffer due writes it.

    Attributes:
        life: An object that identifies the process: a forked child has another one.
        running: Open spans of samples. The caller adds them; `Span.end` and `Span.drop` remove them.
        announced: Open spans with a `begun` line.
        durations_ns: Durations of ended steps, stages and windows in nanoseconds, by kind and name.
        wake: Callback for the next span that begins or ends, or None.
        listener: Receiver of each ended span, or None. A forked child has none.
    """

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self.begin()
        _state.all.add(self)
        _state.end_first()

    def begin(self) -> None:
        """Begin a file in a new process or a forked child. A child does not take over its parent's lines and locks."""
        self.life = object()
        self.running: set[Span] = set()
        self.announced: set[Span] = set()
        self.durations_ns: dict[tuple[str, str], deque[int]] = {}
        self.listener: Listener | None = None
        self.wake: Callable[[], None] | None = None
        self._lines: deque[AnyLine] = deque()
        self._writing = threading.Lock()
        self._oldest = 0
        self._written = 0
        self._write_ns = 0
        # The time at which an event loop will write the buffer, if the loop is still running then.
        self._flush_at = 0
        self._file = TimelineFile(self._run)
        self._exceptions = Exceptions()

    def begun(self, span: Span) -> None:
        """Write the start of a span."""
        self.announced.add(span)
        self.write(span.line)
        # Read it once, because another thread may reset it.
        if (wake := self.wake) is not None:
            wake()

    def raised(self, line: Line, error: BaseException) -> None:
        """Add the line of the exception that leaves a span, if it gets one."""
        raised_line = self._exceptions.line(line, error)
        if raised_line is not None and len(self._lines) < _MAX_LINES:
            self._lines.append(raised_line)

    def write(self, line: BegunLine | DroppedLine) -> None:
        """Write the start or the dropping of a span, unless the disk is too slow."""
        if len(self._lines) < _MAX_LINES:
            self._lines.append(line)
            self.flush()

    def note(self, kind: str, name: str, took_ns: int) -> None:
        """Store the duration of a step, stage or window."""
        durations = self.durations_ns.get((kind, name))
        if durations is not None:
            durations.append(took_ns)
        elif len(self.durations_ns) < _MAX_NAMES:
            self.durations_ns[kind, name] = deque((took_ns,), maxlen=_MAX_DURATIONS)

    def open(self) -> list[Span]:
        """Return the open spans, the oldest first."""
        # `list` copies a set without interruption, while other threads add to it.
        return sorted({*list(self.announced), *list(self.running)}, key=lambda span: span.begun_ns)

    def write_open(self) -> None:
        """Write the starts of spans of samples that have been open for long. After 1 MiB, write all starts again.

        If a span is open and nothing else is written, write a memory line as a sign of life.
        """
        now = time.monotonic_ns()
        again = self._file.size > REPEAT_AFTER_BYTES
        silent = bool(self.announced) and now - self._written > _MAX_SILENCE_NS
        if self._file.path and (line := self._file.memory.look(again or silent)) is not None:
            self._lines.append(line)
        lines: list[AnyLine]
        if again:
            self._file.size = 0
            self._exceptions.again()
            lines = [span.line for span in self.open() if span in self.announced]
        else:
            room = _MAX_OPEN - len(self.announced)
            long = [span for span in self.open() if span not in self.announced and now - span.begun_ns > _LONG_NS]
            lines = []
            for span in long[: max(room, 0)]:
                self.announced.add(span)
                lines.append(span.line)
        self._lines.extend(lines)
        # If a span has ended meanwhile, its end may come before this start. Readers close it all the same.
        self.flush()

    def leave(self) -> None:
        """Write the last line of this process, if it has any."""
        self.flush()
        if self._file.path:
            self._lines.append(
                ExitLine(time.time_ns(), raised.exception_type(), raised.uncaught(), memory_state.peak())
            )
            self.flush()

    def add(self, line: Line, now: int, *, at_once: bool = False) -> None:
        """Buffer a span that ended at `now` (`time.monotonic_ns`). Write the buffer if it is due."""
        if self.listener is not None:
            self.listener.hear(line)
        # Read it once, because another thread may reset it.
        if (wake := self.wake) is not None:
            wake()
        lines = self._lines
        if not lines:
            self._oldest = now
        elif len(lines) >= _MAX_LINES:
            self.flush()
            if len(lines) >= _MAX_LINES:
                log.warning_once("the disk is too slow for the timeline; spans are left out")
                return
        lines.append(line)
        idle = not self.running and now - self._written >= _MIN_IDLE_RATIO * self._write_ns
        if at_once or idle or len(lines) >= _FLUSH_LINES or now - self._oldest > _FLUSH_AFTER_NS:
            self.flush()
        elif now > self._flush_at and (loop := asyncio._get_running_loop()) is not None:
            # The next line may come much later: all other samples may be waiting for one.
            self._flush_at = now + 2 * _FLUSH_AFTER_NS
            loop.call_later(_FLUSH_AFTER_NS / 1e9, self._flush_later)

    def _flush_later(self) -> None:
        self._flush_at = 0
        self.flush()

    def flush(self) -> None:
        """Write the buffer, unless another thread is writing: that thread also writes these lines."""
        # `with` takes the lock without a gap in which a signal could leave it locked, unlike `acquire`.
        while self._lines and not self._writing.locked():
            with self._writing:
                begun = time.monotonic_ns()
                try:
                    lines = [self._lines.popleft() for _ in range(len(self._lines))]
                    self._file.append(lines)
                except OSError as problem:
                    interrupts.pass_on(problem)
                    exists = files.is_folder(self._run.path)
                    log.warning_once(
                        f"can't write the timeline: {problem}" if exists else self._run.unwritable(problem)
                    )
                finally:
                    self._written = time.monotonic_ns()
                    self._write_ns = self._written - begun


class _TimelineState(process.State):
    """The timelines of this process, flushed at its end."""

    ends = process.TIMELINE

    def begin(self) -> None:
        self.all: WeakSet[Timeline] = WeakSet()

    def in_child(self) -> None:
        for timeline in list(self.all):
            timeline.begin()

    def at_exit(self) -> None:
        for timeline in list(self.all):
            timeline.leave()


_state = _TimelineState()
