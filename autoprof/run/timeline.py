"""Writer of a process's timeline, `timeline/<host>-<pid>.jsonl`: one line for each span.

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

# Kinds of which a step has a few, which are written at once; all others are kept and written together.
AT_ONCE = ("step", "stage", "window")
# Kinds of spans that have a kind of stage, which a well-known name tells where nothing else does.
_STAGES = ("stage", "timer")


class Keeper(Protocol):
    """Writer of spans: the timeline of this process, which documents these members."""

    life: object
    going: set[Span]
    told: set[Span]

    def begun(self, span: Span) -> None: ...

    def note(self, kind: str, name: str, took_ns: int) -> None: ...

    def raised(self, line: Line, error: BaseException) -> None: ...

    def add(self, line: Line, now: int, *, at_once: bool = False) -> None: ...

    def write(self, line: BegunLine | DroppedLine) -> None: ...


class Span:
    """A span that began now. `end` writes it down.

    Args:
        ids: The sample or the request that it is of.
        stage_kind: The kind of the stage; None for that which its name tells.

    Attributes:
        thread: The thread in which it began, of those that are written at once.
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
        timeline: Keeper,
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
        """Return the line that says that it has begun."""
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
        """Return when it began, of `time.monotonic_ns`."""
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
        """Note the span; a forked child leaves that to its parent. Never raises.

        Args:
            error: The exception that was raised inside of it.
            counts: Counts of it, such as tokens.
            step: The step, where it was not known at the begin.
            at_ns: When it ended, of `time.monotonic_ns`, where that was not now.
        """
        now = time.monotonic_ns() if at_ns is None else at_ns
        timeline = self._timeline
        if self._life is not timeline.life:
            return
        stage_kind = self._stage_kind
        if stage_kind is None:
            stage_kind = kinds.of(self._name) if self._kind in _STAGES else ""
        timeline.told.discard(self)
        line = Line(
            self._kind,
            self._name,
            self._step if step is None else step,
            self._role,
            self._rank,
            self._start,
            # The wall clock may be set meanwhile.
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
            timeline.going.discard(self)
            if error is not None:
                timeline.raised(line, error)
            timeline.add(line, now)

    def drop(self) -> None:
        """Leave the span out."""
        timeline = self._timeline
        timeline.going.discard(self)
        if self in timeline.told:
            timeline.told.discard(self)
            timeline.write(DroppedLine(self._kind, self._name, self._start))


AnyLine: TypeAlias = Line | BegunLine | DroppedLine | ExitLine | RaisedLine | MemoryLine


class TimelineFile:
    """The file, which is made with the first lines.

    Attributes:
        run: The run that it is of.
        path: Where it is; empty before it is made.
        size: The bytes that were written since the caller has set this to 0.
        memory: This process's memory, since the file was made.
    """

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.path = ""
        self.size = 0
        self.memory = memory_state.MemoryWatch()
        self._first = b""

    def append(self, lines: list[AnyLine]) -> None:
        """Write lines.

        Raises:
            OSError: The disk does not take them.
        """
        content = _encoded(lines)
        self.size += len(content)
        if not self.path:
            path = self.run.process_file("timeline")
            self.run.make(path.parent)
            self._first = _process_line(self.memory.first())
            # An earlier process of the run may have had the same pid: this one's lines begin anew.
            files.append(path, self._first + content)
            self.path = str(path)
            return
        try:
            files.append(self.path, content, self._first)
        except FileNotFoundError as error:  # somebody has removed the folder
            interrupts.pass_on(error)
            self.run.make(Path(self.path).parent)
            files.append(self.path, content, self._first)


_encoder = msgspec.json.Encoder()


def _encoded(lines: list[AnyLine]) -> bytes:
    try:
        return _encoder.encode_lines(lines)
    except Exception as error:  # text with lone surrogates, as in file names that are no UTF-8
        interrupts.pass_on(error)
        return _encoder.encode_lines([_mended(msgspec.to_builtins(line)) for line in lines])


def _mended(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_mended(name): _mended(inner) for name, inner in value.items()}
    return [_mended(inner) for inner in value] if isinstance(value, list) else value


def _process_line(at_first: MemoryState) -> bytes:
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
        memory=at_first,
    )
    return msgspec.json.encode(line) + b"\n"


# Exceptions that say nothing of a fault.
_NO_FAULT = (StopIteration, StopAsyncIteration, GeneratorExit, KeyboardInterrupt, asyncio.CancelledError)
# So many of stages have a line.
_MAX_EXCEPTIONS = 50
# Kinds of spans that are lost with an exception; a tool's or a turn's may be caught. So many of a name and type have a
# line, and so many in all, before what is open is written again.
_LOST = ("sample", "reward")
_MOST_ALIKE, _MOST_LOST = 2, 20


class Exceptions:
    """The exceptions of one process. Several threads may tell of theirs."""

    def __init__(self) -> None:
        # The last one that has a line, and when the span began that it left; of stages, and of samples.
        self._stage: tuple[int, int] = 0, 0
        self._lost: tuple[int, int] = 0, 0
        self._stages = self._samples = 0
        self._alike: Counter[tuple[str, str, str]] = Counter()

    def line(self, line: Line, error: BaseException) -> RaisedLine | None:
        """Return the line of an exception that leaves a span, None where there is to be none."""
        if issubclass(type(error), _NO_FAULT):
            return None
        if not (self._of_sample if line.kind in _LOST else self._of_stage)(line, error):
            return None
        said = raised.of(error)
        return RaisedLine(time.time_ns(), line.kind, line.name, line.step, line.role, line.rank, said)

    def again(self) -> None:
        """Tell of samples anew: readers look at a file's end."""
        self._alike.clear()
        self._samples = 0

    def _of_stage(self, line: Line, error: BaseException) -> bool:
        if line.kind not in ("step", "stage", "window"):
            return False
        # The spans around it began before.
        known = self._stage[0] == id(error) and line.start_ns <= self._stage[1]
        self._stage = id(error), line.start_ns
        self._stages += line.kind != "step"
        return not known and (line.kind == "step" or self._stages <= _MAX_EXCEPTIONS)

    def _of_sample(self, line: Line, error: BaseException) -> bool:
        known = self._lost[0] == id(error) and line.start_ns <= self._lost[1]
        self._lost = id(error), line.start_ns
        what = line.kind, line.name, type_name(error)
        if known or self._alike[what] >= _MOST_ALIKE or self._samples >= _MOST_LOST:
            return False
        self._alike[what] += 1
        self._samples += 1
        return True


# Kept lines are written when there are this many, or when the first is this old.
_MANY = 256
_OLD_NS = 1_000_000_000
# Where the disk does not take them, this many are kept at most.
_MOST = 16 * _MANY
# With nothing going on they are written, too, unless that would take more than this part of the time.
_PART = 20
# Of so many steps, and stages of each name, the durations are kept, for so many names.
_KEPT, _NAMES = 100, 256
# Spans of samples that are older than this are written while they go on, so many of them.
_LONG_NS = 10_000_000_000
_MOST_OPEN = 256
# So long a process in which something is open writes nothing.
_SILENT_NS = 30_000_000_000
# What is open is written again after so many bytes: readers look for it at a file's end.
AGAIN_BYTES = 1 << 20


class Listener(Protocol):
    """A reader of the spans of its own process."""

    def hear(self, line: Line) -> None:
        """Take a span that has ended. Raises nothing."""


class Timeline:
    """One process's spans. Any thread may add to it; the thread that finds lines due writes them.

    Attributes:
        life: Another object in a forked child.
        going: Spans that are going on and will be kept, where the caller puts them: who is interrupted drops them.
        told: Spans that are going on and that a line says of that they have begun.
        took: What steps and stages took that have ended, in nanoseconds, by kind and name.
        waking: Called with the next span that begins or ends.
        listener: Gets each line, where something in this process reads them. A forked child has none.
    """

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self.begin()
        _state.all.add(self)
        _state.end_first()

    def begin(self) -> None:
        """Begin a file, in a new process or a forked child, which has none of its parent's lines and locks."""
        self.life = object()
        self.going: set[Span] = set()
        self.told: set[Span] = set()
        self.took: dict[tuple[str, str], deque[int]] = {}
        self.listener: Listener | None = None
        self.waking: Callable[[], None] | None = None
        self._lines: deque[AnyLine] = deque()
        self._writing = threading.Lock()
        self._oldest = 0
        self._written = 0
        self._took = 0
        # When an event loop is to write what is kept, if it still runs then.
        self._looked_at = 0
        self._file = TimelineFile(self._run)
        self._exceptions = Exceptions()

    def begun(self, span: Span) -> None:
        """Write that a span has begun."""
        self.told.add(span)
        self.write(span.line)
        # Another thread may be faster.
        if (wake := self.waking) is not None:
            wake()

    def raised(self, line: Line, error: BaseException) -> None:
        """Write with a span which exception has left it, and where that was raised."""
        said = self._exceptions.line(line, error)
        if said is not None and len(self._lines) < _MOST:
            self._lines.append(said)

    def write(self, line: BegunLine | DroppedLine) -> None:
        """Write a line of what is open, unless the disk is slow."""
        if len(self._lines) < _MOST:
            self._lines.append(line)
            self.flush()

    def note(self, kind: str, name: str, took_ns: int) -> None:
        """Note what a step or a stage took."""
        before = self.took.get((kind, name))
        if before is not None:
            before.append(took_ns)
        elif len(self.took) < _NAMES:
            self.took[kind, name] = deque((took_ns,), maxlen=_KEPT)

    def open(self) -> list[Span]:
        """Return the spans that are going on, those that began first in front."""
        # One step of the interpreter each: other threads add to the sets.
        return sorted({*list(self.told), *list(self.going)}, key=lambda span: span.begun_ns)

    def tell(self) -> None:
        """Write which spans of samples have been going on for long, and again what is open, where that is far back.

        While something is open and nothing else is written, a line of the memory is a sign of life.
        """
        now = time.monotonic_ns()
        again = self._file.size > AGAIN_BYTES
        silent = bool(self.told) and now - self._written > _SILENT_NS
        if self._file.path and (line := self._file.memory.look(again or silent)) is not None:
            self._lines.append(line)
        lines: list[AnyLine]
        if again:
            self._file.size = 0
            self._exceptions.again()
            lines = [span.line for span in self.open() if span in self.told]
        else:
            room = _MOST_OPEN - len(self.told)
            long = [span for span in self.open() if span not in self.told and now - span.begun_ns > _LONG_NS]
            lines = []
            for span in long[: max(room, 0)]:
                self.told.add(span)
                lines.append(span.line)
        self._lines.extend(lines)
        # One that has ended meanwhile may stand before: its line closes it all the same.
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
        """Keep a line that ends now (`time.monotonic_ns`), and write what is due."""
        if self.listener is not None:
            self.listener.hear(line)
        # Another thread may be faster.
        if (wake := self.waking) is not None:
            wake()
        lines = self._lines
        if not lines:
            self._oldest = now
        elif len(lines) >= _MOST:
            self.flush()
            if len(lines) >= _MOST:
                log.warning_once("the disk is too slow for the timeline; spans are left out")
                return
        lines.append(line)
        idle = not self.going and now - self._written >= _PART * self._took
        if at_once or idle or len(lines) >= _MANY or now - self._oldest > _OLD_NS:
            self.flush()
        elif now > self._looked_at and (loop := asyncio._get_running_loop()) is not None:
            # While all others wait for one sample, no line follows these for long.
            self._looked_at = now + 2 * _OLD_NS
            loop.call_later(_OLD_NS / 1e9, self._look)

    def _look(self) -> None:
        self._looked_at = 0
        self.flush()

    def flush(self) -> None:
        """Write what is kept, unless another thread does so: that one takes these lines along."""
        # No signal can come between `with` and the lock, as it can after `acquire`.
        while self._lines and not self._writing.locked():
            with self._writing:
                begun = time.monotonic_ns()
                try:
                    lines = [self._lines.popleft() for _ in range(len(self._lines))]
                    self._file.append(lines)
                except OSError as problem:
                    interrupts.pass_on(problem)
                    there = files.is_folder(self._run.path)
                    log.warning_once(f"can't write the timeline: {problem}" if there else self._run.unwritable(problem))
                finally:
                    self._written = time.monotonic_ns()
                    self._took = self._written - begun


class _State(process.State):
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


_state = _State()
