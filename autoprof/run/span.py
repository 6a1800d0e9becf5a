"""A span of this process's timeline: what it is, when it began, and the lines of its begin and end."""

from __future__ import annotations

from _thread import get_ident
from collections.abc import Mapping
from typing import Protocol

from autoprof.base.exceptions import type_name
from autoprof.base.originals import time
from autoprof.config import kinds
from autoprof.rundir.lines import BegunLine, DroppedLine, Id, Line

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
