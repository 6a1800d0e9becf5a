"""Writer of a process's timeline, `timeline/<host>-<pid>.jsonl`: a line for each span, as docs/reference/files.md says.

Steps, stages and windows are written when they begin and when they end. The spans of single samples, thousands a step,
are kept until there are many of them, the first is old, one of the others is written, or none is going on any more. So
a process that is killed loses the spans of its last second. Spans that take long are written while they go on (`tell`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol
from weakref import WeakSet

from autoprof.base import files, interrupts, log, process
from autoprof.base.originals import threading, time
from autoprof.run import outcome
from autoprof.run.exceptions import Exceptions
from autoprof.run.span import Span
from autoprof.run.timeline_file import AnyLine, TimelineFile
from autoprof.rundir import memory_state
from autoprof.rundir.layout import RunDir
from autoprof.rundir.lines import BegunLine, DroppedLine, ExitLine, Line

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
            self._lines.append(ExitLine(time.time_ns(), outcome.error(), outcome.told(), memory_state.peak()))
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
