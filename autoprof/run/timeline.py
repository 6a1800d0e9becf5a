"""Writer of a process's timeline, `timeline/<host>-<pid>.jsonl`: a line for each span, as docs/reference/files.md says.

Steps, stages and windows are written when they begin and when they end. The spans of single samples, thousands a step,
are kept until there are many of them, the first is old, one of the others is written, or none is going on any more. So
a process that is killed loses the spans of its last second. Spans that take long are written while they go on (`tell`).
A line is written whole or not at all.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from threading import Lock, get_ident
from typing import Any, Protocol, TypeAlias
from weakref import WeakSet

import msgspec

from autoprof import __version__
from autoprof.base import files, identity, interrupts, log, process
from autoprof.config import kinds
from autoprof.run import outcome, raised
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

# Kinds of which a step has a few; all others are kept and written together.
_AT_ONCE = ("step", "stage", "window")
# Kinds of spans that have a kind of stage, which a well-known name tells where nothing else does.
_STAGES = ("stage", "timer")
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
# Exceptions that say nothing of a fault, and how many of stages have a line.
_NO_FAULT = (StopIteration, StopAsyncIteration, GeneratorExit, KeyboardInterrupt, asyncio.CancelledError)
_MOST_RAISED = 50
# So long a process in which something is open writes nothing.
_SILENT_NS = 30_000_000_000
# What is open is written again after so many bytes: readers look for it at a file's end.
AGAIN_BYTES = 1 << 20


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
        self._timeline = timeline
        self._life = timeline.life
        self._kind, self._name, self._step, self._role, self._rank = kind, name, step, role, rank
        self._ids = ids or {}
        self._stage_kind = stage_kind
        self._start = time.time_ns()
        self._begun = time.monotonic_ns()
        if kind in _AT_ONCE:
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
            None if error is None else type(error).__name__,
            self._ids,
            counts or {},
            stage_kind,
        )
        if self._kind in _AT_ONCE:
            if error is None:
                timeline.note(self._kind, self._name, now - self._begun)
            else:
                timeline.raised(line, error)
            timeline.add(line, now, at_once=True)
        else:
            timeline.going.discard(self)
            timeline.add(line, now)

    def drop(self) -> None:
        """Leave the span out."""
        timeline = self._timeline
        timeline.going.discard(self)
        if self in timeline.told:
            timeline.told.discard(self)
            timeline.write(DroppedLine(self._kind, self._name, self._start))


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
        self._lines: deque[_AnyLine] = deque()
        self._writing = Lock()
        self._oldest = 0
        self._written = 0
        self._took = 0
        # When an event loop is to write what is kept, if it still runs then.
        self._looked_at = 0
        self._path = ""
        self._memory = memory_state.Watch()
        # The last exception that has a line, and when the span began that it left.
        self._raised: tuple[int, int] = 0, 0
        self._raised_count = 0
        self._first = b""
        self._bytes = 0

    def begun(self, span: Span) -> None:
        """Write that a span has begun."""
        self.told.add(span)
        self.write(span.line)

    def raised(self, line: Line, error: BaseException) -> None:
        """Write with a step or stage which exception has left it, and where that was raised."""
        # The spans around it began before.
        known = self._raised[0] == id(error) and line.start_ns <= self._raised[1]
        self._raised = id(error), line.start_ns
        self._raised_count += line.kind != "step"
        if known or isinstance(error, _NO_FAULT) or (line.kind != "step" and self._raised_count > _MOST_RAISED):
            return
        said = raised.of(error)
        if len(self._lines) < _MOST:
            self._lines.append(RaisedLine(time.time_ns(), line.kind, line.name, line.step, line.role, line.rank, said))

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
        again = self._bytes > AGAIN_BYTES
        silent = bool(self.told) and now - self._written > _SILENT_NS
        if self._path and (line := self._memory.look(again or silent)) is not None:
            self._lines.append(line)
        lines: list[_AnyLine]
        if again:
            self._bytes = 0
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
        if self._path:
            self._lines.append(ExitLine(time.time_ns(), outcome.error(), outcome.told(), memory_state.peak()))
            self.flush()

    def add(self, line: Line, now: int, *, at_once: bool = False) -> None:
        """Keep a line that ends now (`time.monotonic_ns`), and write what is due."""
        if self.listener is not None:
            self.listener.hear(line)
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
                    self._append(_encoded(lines))
                except OSError as problem:
                    interrupts.pass_on(problem)
                    there = os.path.isdir(self._run.path)
                    log.warning_once(f"can't write the timeline: {problem}" if there else self._run.unwritable(problem))
                finally:
                    self._written = time.monotonic_ns()
                    self._took = self._written - begun

    def _append(self, content: bytes) -> None:
        self._bytes += len(content)
        if not self._path:
            path = self._run.process_file("timeline")
            self._run.make(path.parent)
            self._first = _process_line(self._memory.first())
            # An earlier process of the run may have had the same pid: this one's lines begin anew.
            files.append(path, self._first + content)
            self._path = str(path)
            return
        try:
            files.append(self._path, content, self._first)
        except FileNotFoundError as error:  # somebody has removed the folder
            interrupts.pass_on(error)
            self._run.make(Path(self._path).parent)
            files.append(self._path, content, self._first)


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


_AnyLine: TypeAlias = Line | BegunLine | DroppedLine | ExitLine | RaisedLine | MemoryLine
_state = _State()
_encoder = msgspec.json.Encoder()


def _encoded(lines: list[_AnyLine]) -> bytes:
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
    return value


def _process_line(at_first: MemoryState) -> bytes:
    clock = Moment(time.time_ns(), time.monotonic_ns())
    pid = os.getpid()
    ticks = identity.began(pid) or 0
    process = ProcessLine(
        host=identity.HOST,
        pid=pid,
        clock=clock,
        version=__version__,
        ticks=ticks,
        boot=identity.machine(),
        stderr=identity.own_stderr(),
        memory=at_first,
    )
    return msgspec.json.encode(process) + b"\n"
