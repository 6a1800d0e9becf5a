"""Writer of a process's timeline, `journal/<host>-<pid>.jsonl`: one journal line per span.

Steps, stages and windows are written when they begin and when they end. Spans of samples are buffered for at most a
second, or until a span of another kind is written, because a step may have thousands of them. A journal line is written
whole or not at all. An exception gets a line for the innermost step or stage that it left.
"""

from __future__ import annotations

import asyncio
import sys
from _thread import get_ident
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias
from weakref import WeakSet

import msgspec

from autoprof import __version__
from autoprof.base import files, identity, log, process, seam
from autoprof.base.exceptions import type_name
from autoprof.base.originals import os, threading, time
from autoprof.config import kinds
from autoprof.run import raised
from autoprof.rundir import memory_state
from autoprof.rundir.layout import RunDir
from autoprof.rundir.records import (
    LOST_LINES,
    BegunLine,
    DroppedLine,
    ErrorLine,
    ExitLine,
    HookLine,
    Id,
    Line,
    MemoryLine,
    Moment,
    ProcessLine,
    RaisedLine,
)

# Kinds of spans that are written immediately, because they are rare. Spans of all other kinds are buffered.
AT_ONCE = ("step", "stage", "window")
# Kinds of spans that have a stage kind. If the caller gives no stage kind, it is derived from the name of the span.
_STAGES = ("stage", "timer")


class Span:
    """A span that begins when the object is created. `end` writes the span.

    Args:
        timeline: The timeline to write to.
        kind: The kind of the span.
        name: The name of the span.
        step: The global step, or None if unknown.
        role: The role.
        rank: The rank, or None if the process has no rank.
        ids: The ids of the sample or request that the span belongs to.
        stage_kind: The kind of the stage; None to derive the kind from the name.

    Attributes:
        line: The journal line for the start of the span.
        begun_ns: The start by `time.monotonic_ns`.
        thread: The id of the thread in which the span began. Only spans of the kinds in `AT_ONCE` have this attribute.
    """

    __slots__ = ("_life", "_timeline", "begun_ns", "line", "thread")

    def __init__(
        self,
        timeline: Timeline,
        kind: str,
        name: str,
        *,
        step: int | None,
        role: str,
        rank: int | None,
        ids: Mapping[str, Id] | None = None,
        stage_kind: str | None = None,
    ) -> None:
        if stage_kind is None:
            stage_kind = kinds.of(name) if kind in _STAGES else ""
        self._timeline = timeline
        self._life = timeline.life
        self.line = BegunLine(kind, name, step, role, rank, time.time_ns(), ids or {}, stage_kind)
        self.begun_ns = time.monotonic_ns()
        if kind in AT_ONCE:
            self.thread = get_ident()
            timeline.announced.add(self)
            timeline.write(self.line)

    def end(
        self,
        error: BaseException | None = None,
        counts: Mapping[str, int] | None = None,
        *,
        step: int | None = None,
        at_ns: int | None = None,
    ) -> None:
        """Write the span. Do nothing in a forked child of the process that began the span. Never raises.

        Args:
            error: The exception that ended the span, or None.
            counts: Dict from name to count, such as the number of tokens.
            step: The step, if it was unknown at the start.
            at_ns: The end of the span by `time.monotonic_ns`; None if the span ends now.
        """
        now = time.monotonic_ns() if at_ns is None else at_ns
        if self._life is not self._timeline.life:
            return
        begun_line = self.line
        line = Line(
            begun_line.span,
            begun_line.name,
            begun_line.step if step is None else step,
            begun_line.role,
            begun_line.rank,
            begun_line.start_ns,
            # The duration comes from the monotonic clock, because the wall clock may be set during the span.
            begun_line.start_ns + now - self.begun_ns,
            None if error is None else type_name(error),
            begun_line.ids,
            counts or {},
            begun_line.stage_kind,
        )
        self._timeline.add(self, line, now, error)

    def drop(self) -> None:
        """End the span without a place on the timeline. If its start was written, write a `dropped` line."""
        timeline = self._timeline
        timeline.running.discard(self)
        if self in timeline.announced:
            timeline.announced.discard(self)
            timeline.write(DroppedLine(self.line.span, self.line.name, self.line.start_ns))


AnyLine: TypeAlias = (
    ProcessLine | HookLine | ErrorLine | Line | BegunLine | DroppedLine | ExitLine | RaisedLine | MemoryLine
)
_encoder = msgspec.json.Encoder()


def _encoded(lines: Sequence[AnyLine]) -> bytes:
    try:
        return _encoder.encode_lines(lines)
    except UnicodeEncodeError as error:  # text with lone surrogates, such as file names that are not UTF-8
        seam.pass_on(error)
        return _encoder.encode_lines([_without_surrogates(msgspec.to_builtins(line)) for line in lines])


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_without_surrogates(name): _without_surrogates(element) for name, element in value.items()}
    return [_without_surrogates(element) for element in value] if isinstance(value, list) else value


# Exceptions that a working program raises too, so they get no journal line.
_NO_FAULT = (StopIteration, StopAsyncIteration, GeneratorExit, KeyboardInterrupt, asyncio.CancelledError)
# Maximum number of `raised` lines for stages and windows that a process writes.
_MAX_STAGE_LINES = 50
# Kinds of spans for which an exception means that a sample is lost. Exceptions of tools and turns may be caught later.
_LOST = ("sample", "reward")
# Maximum number of `raised` lines for samples and rewards per _LIMIT_BYTES of the file: for the same span name and
# exception type, and for all of them.
_MAX_ALIKE_LINES, _MAX_SAMPLE_LINES = 2, 20


class Exceptions:
    """The part of the timeline that decides which exceptions of the process get a `raised` line.

    Several threads may use this object.

    Attributes:
        count: The number of `raised` lines so far.
    """

    def __init__(self) -> None:
        self.count = 0
        # The id of the last exception, and the start of the span that it left: in stages, and in samples.
        self._stage: tuple[int, int] = 0, 0
        self._lost: tuple[int, int] = 0, 0
        self._stages = self._samples = 0
        self._alike: Counter[tuple[str, str, str]] = Counter()

    def line(self, line: Line, error: BaseException) -> RaisedLine | None:
        """Return the `raised` line for an exception that leaves a span, or None if the exception gets no line.

        Args:
            line: The journal line for the end of the span.
            error: The exception.
        """
        if issubclass(type(error), _NO_FAULT):
            return None
        if not (self._takes_sample if line.kind in _LOST else self._takes_stage)(line, error):
            return None
        self.count += 1
        return RaisedLine(time.time_ns(), line.kind, line.name, line.step, line.role, line.rank, raised.of(error))

    def again(self) -> None:
        """Allow the full number of lines for samples again. Readers read only the end of a file."""
        self._alike.clear()
        self._samples = 0

    def _takes_stage(self, line: Line, error: BaseException) -> bool:
        if line.kind not in ("step", "stage", "window"):
            return False
        # If the exception already left a span that began later, it is now leaving the spans around that span.
        is_leaving_outer_span = self._stage[0] == id(error) and line.start_ns <= self._stage[1]
        self._stage = id(error), line.start_ns
        self._stages += line.kind != "step"
        return not is_leaving_outer_span and (line.kind == "step" or self._stages <= _MAX_STAGE_LINES)

    def _takes_sample(self, line: Line, error: BaseException) -> bool:
        is_leaving_outer_span = self._lost[0] == id(error) and line.start_ns <= self._lost[1]
        self._lost = id(error), line.start_ns
        key = line.kind, line.name, type_name(error)
        if is_leaving_outer_span or self._alike[key] >= _MAX_ALIKE_LINES or self._samples >= _MAX_SAMPLE_LINES:
            return False
        self._alike[key] += 1
        self._samples += 1
        return True


# The buffer is written when it has _FLUSH_LINES lines, or when its first line is _FLUSH_AFTER_NS old.
_FLUSH_LINES = 256
_FLUSH_AFTER_NS = 1_000_000_000
# If a write takes longer than _SLOW_WRITE_NS, the disk is too slow, and at most _MAX_LINES lines are buffered.
_SLOW_WRITE_NS = 2_000_000_000
_MAX_LINES = 16 * _FLUSH_LINES
# A process without open spans writes each line immediately, unless it would spend more than 1/20 of its time on this.
_MIN_IDLE_RATIO = 20
# Maximum number of durations that are kept per kind and name, and of pairs of kind and name with durations.
_MAX_DURATIONS, _MAX_NAMES = 100, 256
# The start of a buffered span is written once the span has been open for _LONG_NS. At most _MAX_OPEN starts of open
# spans are written.
_LONG_NS = 10_000_000_000
_MAX_OPEN = 256
# A process with an open span writes at least one line in this period, as a sign of life.
_MAX_SILENCE_NS = 30_000_000_000
# A new part begins after PART_BYTES, because readers read the end of a file. A part is at least 16 times as long as the
# lines at its beginning.
PART_BYTES, _PARTS_RATIO = 64 << 10, 16
# After this number of bytes, samples and rewards get the full number of `raised` lines again.
_LIMIT_BYTES = 1 << 20
_PYTHON = sys.version.split()[0]


class Listener(Protocol):
    """An object that gets each span of this process when the span ends."""

    def hear(self, line: Line) -> None:
        """Process the line of an ended span. Never raises."""


class Timeline:
    """The open spans of one process, and the writer of its journal.

    Any thread may add lines to the buffer. The thread whose line makes the buffer full or too old writes the buffer.
    The file is made when the first lines are written. If the file is moved or removed later, a new file is made.

    Args:
        run: The run directory.
        restore: Callback that is called after a new file has replaced a file that was moved or removed. The run
            directory may be new and empty then.
        facts: Function that returns those fields of the process line that may change while the process runs.
        lines: Function that returns the lines of hooks and errors for the beginning of a part. Its argument is True if
            the part begins a file.

    Attributes:
        life: An object that identifies the process. A forked child gets another object.
        running: Open spans of samples. The caller adds them; `Span.end` and `Span.drop` remove them.
        announced: Open spans with a `begun` line.
        durations_ns: Dict from kind and name to the durations of the last ended steps, stages and windows, in
            nanoseconds.
        wake: Callback that is called when a span begins or ends, or None.
        listener: The object that gets each ended span, or None. A forked child has no listener.
    """

    def __init__(
        self,
        run: RunDir,
        restore: Callable[[], None] | None = None,
        facts: Callable[[], dict[str, Any]] = dict,
        lines: Callable[[bool], list[HookLine | ErrorLine]] = lambda whole: [],
    ) -> None:
        self._run = run
        self._restore = restore
        self._facts = facts
        self._hook_lines = lines
        self.begin()
        _state.all.add(self)
        _state.end_first()

    def begin(self) -> None:
        """Set the initial state, in a new process or a forked child. The next lines begin a new file.

        A forked child does not keep the lines and locks of its parent.
        """
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
        self._steps = 0
        self._exceptions = Exceptions()
        self._memory = memory_state.MemoryWatch()
        run, path = self._run, self._run.process_file("journal")
        self._file = files.OwnFile(path, lambda: run.make(path.parent), lambda: self._part(whole=True))
        self.has_file = False
        self._is_replaced = False
        # The bytes since the beginning of the last part, and the bytes after which the next part begins.
        self._size, self._part_size = 0, PART_BYTES
        # The bytes that were written since `Exceptions.again` was called.
        self._limited_size = 0
        # The start of the current write by `time.monotonic_ns`; 0 if no thread is writing.
        self._write_began = 0
        # The number of lines that could not be written, the last reason, and the number that the file reports.
        self._lost, self._lost_reason, self._lost_written = 0, "", 0

    def write(self, *lines: BegunLine | DroppedLine | HookLine | ErrorLine) -> None:
        """Write the line of a span that began or was dropped, or lines of hooks and errors.

        If the disk is too slow, count the lines as lost instead.
        """
        if self._has_room(len(lines)):
            self._lines.extend(lines)
            self.flush()
        # Read `wake` once, because another thread may reset it.
        if (wake := self.wake) is not None:
            wake()

    def add(self, span: Span, line: Line, now: int, error: BaseException | None) -> None:
        """Buffer the line of an ended span. Write the buffer if it is full or too old, or if the span is in `AT_ONCE`.

        Args:
            span: The span.
            line: The journal line for the end of the span.
            now: The end of the span by `time.monotonic_ns`.
            error: The exception that ended the span, or None.
        """
        self.announced.discard(span)
        self.running.discard(span)
        at_once = line.kind in AT_ONCE
        if error is not None:
            at_once |= self._raised(line, error)
        elif at_once:
            key = line.kind, line.name
            if key in self.durations_ns:
                self.durations_ns[key].append(now - span.begun_ns)
            elif len(self.durations_ns) < _MAX_NAMES:
                self.durations_ns[key] = deque((now - span.begun_ns,), maxlen=_MAX_DURATIONS)
        self._steps += line.kind == "step"
        if self.listener is not None:
            self.listener.hear(line)
        if (wake := self.wake) is not None:
            wake()
        lines = self._lines
        if not lines:
            self._oldest = now
        elif not self._has_room():
            return
        lines.append(line)
        idle = not self.running and now - self._written >= _MIN_IDLE_RATIO * self._write_ns
        # The watcher flushes each second, but it may not be running.
        if at_once or idle or len(lines) >= _FLUSH_LINES or now - self._oldest > _FLUSH_AFTER_NS:
            self.flush()

    def _has_room(self, count: int = 1) -> bool:
        """Return True if the buffer takes `count` more lines.

        If the buffer is full because a write takes long, count `count` lines as lost and return False.
        """
        if len(self._lines) < _MAX_LINES:
            return True
        self.flush()
        began = self._write_began
        if not began or time.monotonic_ns() - began < _SLOW_WRITE_NS:
            return True
        self._lost, self._lost_reason = self._lost + count, f"a write took over {_SLOW_WRITE_NS // 10**9} s"
        log.warning_once("the disk is too slow for the timeline; spans are left out")
        return False

    def _raised(self, line: Line, error: BaseException) -> bool:
        """Buffer a `raised` line for the exception that leaves a span. Return False if the exception gets no line."""
        raised_line = self._exceptions.line(line, error)
        if raised_line is None or not self._has_room():
            return False
        self._lines.append(raised_line)
        return True

    def open(self) -> list[Span]:
        """Return the open spans, the oldest first."""
        # Other threads may change the sets, but no thread can interrupt the copy that `list` makes.
        return sorted({*list(self.announced), *list(self.running)}, key=lambda span: span.begun_ns)

    def look(self) -> None:
        """Do the work that is due every ten seconds.

        If the run directory was moved, begin a new file at the old path. Write the starts of buffered spans that have
        been open for ten seconds. If a span is open and no line was written for 30 seconds, write a memory line as a
        sign of life.
        """
        is_moved = self.has_file and self._file.is_moved()
        if is_moved:
            with self._writing:
                self._on_disk(self._file.close)
        now = time.monotonic_ns()
        silent = bool(self.announced) and now - self._written > _MAX_SILENCE_NS
        if self.has_file and (line := self._memory.look(silent or is_moved)) is not None:
            self._lines.append(line)
        room = max(_MAX_OPEN - len(self.announced), 0)
        long_spans = [span for span in self.open() if span not in self.announced and now - span.begun_ns > _LONG_NS]
        for span in long_spans[:room]:
            self.announced.add(span)
            # If another thread has just ended the span, the file may have the end before this start. Readers close the
            # span in this case too.
            self._lines.append(span.line)
        self.flush()
        self._on_disk(self._file.sync)

    def leave(self) -> None:
        """Write the exit line of this process, if it has a journal, and close the file."""
        self.flush()
        if self.has_file:
            error, exception = raised.exception_type(), raised.uncaught()
            exit_line = ExitLine(
                time.time_ns(), error, exception, memory_state.peak(), self._steps, self._exceptions.count
            )
            self._lines.append(exit_line)
            self.flush()
        self.close()

    def close(self) -> None:
        """Close the file. Later lines open it again."""
        if not self._writing.locked():
            with self._writing:
                self._on_disk(self._file.close)

    def _on_disk(self, work: Callable[[], None]) -> None:
        """Sync or close the file, and log an error. A network file system reports a full disk only at that time."""
        try:
            work()
        except OSError as problem:
            seam.pass_on(problem)
            log.warning_once(self._run.unwritable(problem))

    def flush(self) -> None:
        """Write the buffer. If another thread is writing, do nothing: that thread also writes these lines."""
        # A signal handler may raise an exception. With `acquire` instead of `with`, the lock could then stay locked.
        while self._lines and not self._writing.locked():
            with self._writing:
                self._write_began = begin_ns = time.monotonic_ns()
                lines: list[AnyLine] = []
                try:
                    lines = [self._lines.popleft() for _ in range(len(self._lines))]
                    self._write_lines(lines)
                except OSError as problem:
                    seam.pass_on(problem)
                    self._lost, self._lost_reason = self._lost + len(lines), problem.strerror or str(problem)
                    log.warning_once(self._run.unwritable(problem))
                finally:
                    self._written = time.monotonic_ns()
                    self._write_ns, self._write_began = self._written - begin_ns, 0
        if self._is_replaced:
            self._is_replaced = False
            if files.exists(self._run.run_json):
                log.warning_once(f"a file of {self._run.path} was moved or removed; autoprof writes a new one")
            if self._restore is not None:
                self._restore()

    def _write_lines(self, lines: Sequence[AnyLine]) -> None:
        content = _encoded(lines)
        if (lost := self._lost) != self._lost_written:
            content = _encoded([self._lost_line()]) + content
        if self._size > self._part_size:
            content = self._part() + content
        self._append(content)
        self._lost_written = lost

    def _lost_line(self) -> ErrorLine:
        last_error = f"{self._lost} lines of the timeline were lost: {self._lost_reason}"
        return ErrorLine(where=LOST_LINES, count=self._lost, last=last_error)

    def begin_part(self) -> None:
        """Make the file if it does not exist. If it exists, begin a new part with the next line that is written.

        Raises:
            OSError: The file can't be made.
        """
        if self.has_file:
            self._size = self._part_size + 1
        elif not self._writing.locked():
            with self._writing:
                self._append(b"")

    def _append(self, content: bytes) -> None:
        if self._file.append(content):
            self._is_replaced, self.has_file = self.has_file, True
        self._size += len(content)
        self._limited_size += len(content)
        if self._limited_size > _LIMIT_BYTES:
            self._limited_size = 0
            self._exceptions.again()

    def _part(self, whole: bool = False) -> bytes:
        """Return the lines at the beginning of a part: the process line, the open spans, hooks and errors.

        If `whole` is true, the part begins a file, and has the lines of all hooks instead of the failed hooks only.
        """
        pid = os.getpid()
        process_line = ProcessLine(
            host=identity.HOST,
            pid=pid,
            clock=Moment(time.time_ns(), time.monotonic_ns()),
            version=__version__,
            ticks=identity.start_ticks(pid) or 0,
            namespace=identity.pid_namespace(),
            boot=identity.machine(),
            parent=os.getppid(),
            python=_PYTHON,
            stderr=identity.own_stderr(),
            memory=self._memory.first(),
            steps=self._steps,
            raised=self._exceptions.count,
            **self._facts(),
        )
        begun_lines = [span.line for span in self.open() if span in self.announced]
        lost_lines = [self._lost_line()] if self._lost_written else []
        content = _encoded([process_line, *begun_lines, *self._hook_lines(whole), *lost_lines])
        # The part must be longer if these lines are long, for example with many open spans.
        self._size, self._part_size = 0, max(PART_BYTES, _PARTS_RATIO * len(content))
        return content


class _TimelineState(process.State):
    """The timelines of this process. The exit of the process writes their last lines."""

    ends = process.TIMELINE

    def begin(self) -> None:
        for timeline in list(getattr(self, "all", ())):
            timeline.close()
        self.all: WeakSet[Timeline] = WeakSet()

    def in_child(self) -> None:
        for timeline in list(self.all):
            timeline.begin()

    def at_exit(self) -> None:
        for timeline in list(self.all):
            timeline.leave()


_state = _TimelineState()
