"""Spans of a run, a line each: `timeline/<host>-<pid>.jsonl`. docs/how-it-works.md has the format.

Steps, stages and windows are written when they end. The spans of single samples, thousands a step, are kept until there
are some of them, the first is old, one of the others is written, or none is going on any more. So what a process that
is killed loses is what ended in its last second. A line is written whole or not at all.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakSet

import msgspec

from autoprof import __version__, _files, interrupts, log, rundir
from autoprof.rundir import RunDir

if TYPE_CHECKING:
    from autoprof.runtime import Runtime

# What an id is. Spans know few of them.
Id: TypeAlias = "str | int | float | bool"

# Kinds of which a step has a few; all others are kept and written together.
_AT_ONCE = ("step", "stage", "window")
# Kept lines are written when there are so many, or when the first is so old.
_MANY = 256
_OLD_NS = 1_000_000_000
# Where the disk does not take them, so many are kept at most.
_MOST = 16 * _MANY
# With nothing going on they are written, too, unless that would take more of the time than one part in so many.
_PART = 20


class Line(msgspec.Struct, omit_defaults=True):
    """A span as it is written."""

    kind: str
    name: str
    step: int | None
    role: str
    rank: int | None
    start_ns: int
    end_ns: int
    error: str | None = None
    ids: Mapping[str, Id] | None = None
    counts: Mapping[str, int] | None = None


class Span:
    """A span that began now. `end` writes it down.

    Args:
        ids: Which of many it is: the sample, the request.
    """

    __slots__ = ("_begun", "_ids", "_kind", "_life", "_name", "_rank", "_role", "_start", "_step", "_timeline")

    def __init__(
        self,
        run: Runtime,
        kind: str,
        name: str,
        *,
        step: int | None,
        role: str,
        rank: int | None,
        ids: Mapping[str, Id] | None = None,
    ) -> None:
        self._timeline = run.timeline
        self._life = run.timeline.life
        self._kind, self._name, self._step, self._role, self._rank = kind, name, step, role, rank
        self._ids = ids or None
        if kind not in _AT_ONCE:
            self._timeline.going.add(self)
        self._start = time.time_ns()
        self._begun = time.monotonic_ns()

    def end(
        self,
        error: BaseException | None = None,
        counts: Mapping[str, int] | None = None,
        *,
        step: int | None = None,
    ) -> None:
        """Note the span; a forked child leaves that to its parent. Never raises.

        Args:
            error: What was raised inside of it.
            counts: What was counted, such as tokens.
            step: The step, where it was not known at the begin.
        """
        now = time.monotonic_ns()
        timeline = self._timeline
        if self._life is not timeline.life:
            return
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
            counts or None,
        )
        if self._kind in _AT_ONCE:
            timeline.add(line, now, at_once=True)
        else:
            timeline.going.discard(self)
            timeline.add(line, now)

    def drop(self) -> None:
        """Leave the span out."""
        self._timeline.going.discard(self)


class Timeline:
    """What one process writes of a run. Any thread may add to it; whoever finds that lines are due writes them.

    Attributes:
        life: Another object in a forked child.
        going: The spans that are going on and will be kept.
        hear: Told of each line, where somebody in this process goes by them. A forked child tells nobody.
    """

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._begin()
        _all.add(self)

    def _begin(self) -> None:
        self.life = object()
        self.going: set[Span] = set()
        self.hear: Callable[[Line], None] | None = None
        self._lines: deque[Line] = deque()
        self._writing = Lock()
        self._oldest = 0
        self._written = 0
        self._took = 0
        # When an event loop is to write what is kept, if it still runs then.
        self._looked_at = 0
        self._path = ""

    def add(self, line: Line, now: int, *, at_once: bool = False) -> None:
        """Keep a line that ends now (`time.monotonic_ns`), and write what is due."""
        if self.hear is not None:
            self.hear(line)
        lines = self._lines
        if not lines:
            self._oldest = now
        elif len(lines) >= _MOST:
            self.flush()
            if len(lines) >= _MOST:
                log.warning_once("the timeline is written too slowly; spans are left out")
                return
        lines.append(line)
        idle = not self.going and now - self._written >= _PART * self._took
        if at_once or idle or len(lines) >= _MANY or now - self._oldest > _OLD_NS:
            self.flush()
        elif now > self._looked_at and (loop := asyncio._get_running_loop()) is not None:
            # Where all others wait for one sample, no line comes after these for long.
            self._looked_at = now + 2 * _OLD_NS
            loop.call_later(_OLD_NS / 1e9, self._look)

    def _look(self) -> None:
        self._looked_at = 0
        self.flush()

    def flush(self) -> None:
        """Write what is kept, unless another thread is about it: that one takes these lines along."""
        while self._lines and self._writing.acquire(blocking=False):
            try:
                begun = time.monotonic_ns()
                lines = [self._lines.popleft() for _ in range(len(self._lines))]
                self._append(_encoded(lines))
            except OSError as problem:
                interrupts.pass_on(problem)
                there = os.path.isdir(self._run.path)
                log.warning_once(f"can't write the timeline: {problem}" if there else self._run.unwritable(problem))
            finally:
                self._written = time.monotonic_ns()
                self._took = self._written - begun
                self._writing.release()

    def _append(self, content: bytes) -> None:
        first = _process_line()
        if not self._path:
            path = self._run.process_file("timeline", ".jsonl")
            self._run.make(path.parent)
            # An earlier process of the run may have had the same pid: what this one writes begins anew.
            _files.append(path, first + content)
            self._path = str(path)
            return
        try:
            _files.append(self._path, content, first)
        except FileNotFoundError:  # somebody has removed the folder
            self._run.make(Path(self._path).parent)
            _files.append(self._path, content, first)


_encoder = msgspec.json.Encoder()
_all: WeakSet[Timeline] = WeakSet()


def _encoded(lines: list[Line]) -> bytes:
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


def _process_line() -> bytes:
    clock = {"unix_ns": time.time_ns(), "monotonic_ns": time.monotonic_ns()}
    process = {"kind": "process", "host": rundir.HOST, "pid": os.getpid(), "clock": clock, "version": __version__}
    return msgspec.json.encode(process) + b"\n"


def _in_child() -> None:
    """A forked child has a file of its own, and none of its parent's lines and locks."""
    for timeline in list(_all):
        timeline._begin()


def _at_exit() -> None:
    for timeline in list(_all):
        timeline.flush()


os.register_at_fork(after_in_child=_in_child)
atexit.register(_at_exit)
