"""Stages: named pieces of work inside a step, in the processes that do it."""

from __future__ import annotations

import os

from autoprof import board, capture, runtime
from autoprof.behaviours import Behaviour
from autoprof.paths import CallPath
from autoprof.placement import Subject
from autoprof.settings import Settings
from autoprof.timeline import Span as TimelineSpan
from autoprof.waits import InThread
from autoprof.window import Ranks
from autoprof.wrapping import CALL, Around, Call


class Span(Behaviour):
    """One call is a span of the timeline, and is not captured.

    Attributes:
        stage: The stage's name, the target's own.
        role: Who does it.
        rank: Path from a parameter of the call to the global rank; without it the variable RANK, else 0.
        when: Paths with the values they must have.
    """

    stage: str
    role: str
    rank: CallPath = ""
    when: dict[CallPath, str] = {}

    def around(self, call: Call) -> Around:
        run = runtime.current()
        if run is None or not self.applies(call):
            yield CALL
            return None
        posting = yield InThread(board.read, run.info.id)
        step = posting.step if posting is not None else None
        span = TimelineSpan(run, "stage", self.stage, step=step, role=self.role, rank=self.rank_of(call))
        outcome = yield CALL
        span.end(outcome.error)
        return None

    def applies(self, call: Call) -> bool:
        """Whether the call is one that the hook is for."""
        return all(str(call.at(path, "")) == value for path, value in self.when.items())

    def rank_of(self, call: Call) -> int:
        """The global rank of this process."""
        return int(call.at(self.rank) if self.rank else os.environ.get("RANK", 0))


_running: set[tuple[str, str]] = set()


class Stage(Span):
    """One call is a stage of the step, captured when the window is open for its role and rank.

    A call inside a call of the same stage is part of it.
    """

    def around(self, call: Call) -> Around:
        run = runtime.current()
        who = (self.role, self.stage)
        if run is None or who in _running or not self.applies(call):
            yield CALL
            return None
        _running.add(who)
        try:
            yield from self._run(run, call)
        finally:
            _running.discard(who)
        return None

    def _run(self, run: runtime.Runtime, call: Call) -> Around:
        posting = yield InThread(board.read, run.info.id)
        step = posting.step if posting is not None else None
        rank = self.rank_of(call)
        recording = None
        if posting is not None and posting.captured:
            settings = run.settings.overridden(posting.overrides)
            if takes(settings, self.role, range(rank, rank + 1)):
                subject = Subject(step=posting.step, role=self.role, stage=self.stage, rank=rank)
                recording = capture.begin(run, subject, settings.for_role(self.role))
        span = TimelineSpan(run, "stage", self.stage, step=step, role=self.role, rank=rank)
        outcome = yield CALL
        span.end(outcome.error)
        if recording is not None:
            capture.end(recording, outcome.error)
        return None


def takes(settings: Settings, role: str, ranks: range) -> bool:
    """Whether the window is for this role, and for one of these global ranks."""
    return settings.takes_role(role) and Ranks.parse(settings.for_role(role).ranks).any_in(ranks)
