"""Stages: named pieces of work inside a step, in the processes that do it."""

from __future__ import annotations

import os
from fnmatch import fnmatchcase

import msgspec

from autoprof import board, capture, runtime, tools
from autoprof.behaviours import Behaviour
from autoprof.board import Posting
from autoprof.capture import Capture
from autoprof.paths import CallPath
from autoprof.placement import Placement, Subject
from autoprof.runtime import Runtime
from autoprof.settings import Settings
from autoprof.timeline import Span as TimelineSpan
from autoprof.waits import InThread
from autoprof.window import Ranks, parse_iterations
from autoprof.wrapping import CALL, Around, Call


class Read(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A name that is read from the call.

    Attributes:
        path: Path from a parameter of the call to what the target calls it.
        names: What that is called here, by patterns as in fnmatch for the target's name. The first that matches
            decides; a call whose name none matches is none of the hook's. Without a table the target's names are taken.
    """

    path: CallPath
    names: dict[str, str] = {}

    def of(self, call: Call) -> str:
        """The name for this call, or an empty text where it is none of the hook's."""
        found = str(call.at(self.path, ""))
        if not self.names:
            return found
        return next((name for pattern, name in self.names.items() if fnmatchcase(found, pattern)), "")


# A running stage is known by its role and its name.
Who = tuple[str, str]


class Named(Behaviour):
    """What is common to stages and spans.

    Attributes:
        stage: The stage's name, the target's own; or where it is read from the call.
        role: Who does it; or where that is read from the call.
        rank: Path from a parameter of the call to the global rank; without it the variable RANK, else 0.
    """

    stage: str | Read
    role: str | Read
    rank: CallPath = ""

    def who(self, call: Call) -> Who | None:
        """The role and the name of the stage that the call is, or None where the hook is not for it."""
        role = self.role if isinstance(self.role, str) else self.role.of(call)
        stage = self.stage if isinstance(self.stage, str) else self.stage.of(call)
        return (role, stage) if role and stage else None

    def rank_of(self, call: Call) -> int:
        """The global rank of this process."""
        return int(call.at(self.rank)) if self.rank else own_rank()

    def span(self, run: Runtime, who: Who, call: Call, posting: Posting | None) -> TimelineSpan:
        """The span of the timeline, which begins now."""
        return TimelineSpan(run, "stage", who[1], step=_step(posting), role=who[0], rank=self.rank_of(call))


class Span(Named):
    """One call is a span of the timeline, and is not captured.

    Attributes:
        whole: Whether nothing inside of it is a stage of the step: an evaluation generates and computes losses as
            training does, for longer than a trace could hold.
    """

    whole: bool = False

    def around(self, call: Call) -> Around:
        run, who = runtime.current(), self.who(call)
        if run is None or who is None:
            yield CALL
            return None
        posting = yield InThread(board.read, run.info.id)
        span = self.span(run, who, call, posting)
        if self.whole:
            _whole.append(span)
        outcome = yield CALL
        if self.whole:
            _whole.remove(span)
        span.end(outcome.error)
        return None


class Stage(Named):
    """One call is a stage of the step, captured when the window is open for its role and rank.

    A call inside a stage of the same role is part of it: the forward pass of an update computes log-probs, too.

    Attributes:
        passes: Whether a `stage.pass` hook counts forward passes inside of it. Those of `AUTOPROF_ROLLOUT_ITERATIONS`
            are recorded then, not the whole.
        outermost: Whether a call inside a stage of another role is part of that one, too.
    """

    passes: bool = False
    outermost: bool = False

    def around(self, call: Call) -> Around:
        run, who = runtime.current(), self.who(call)
        if run is None or who is None or (self.outermost and running):
            yield CALL
            return None
        posting = yield InThread(board.read, run.info.id)
        stage = None if inside(who, posting) else Running(self, run, who, call, posting)
        outcome = yield CALL
        if stage is not None:
            stage.end(outcome.error)
        return None

    def wanted(self, run: Runtime, who: Who, call: Call, posting: Posting | None) -> tuple[Subject, Settings] | None:
        """What is to be captured, and how, if the window is open for this role and rank."""
        if posting is None or not posting.captured:
            return None
        role, rank = who[0], self.rank_of(call)
        settings = run.settings.overridden(posting.overrides)
        if not takes(settings, role, range(rank, rank + 1)):
            return None
        return Subject(step=posting.step, role=role, stage=who[1], rank=rank), settings.for_role(role)


class Pass(Behaviour):
    """The call is made once in each forward pass of the stages that count them."""

    def around(self, call: Call) -> Around:
        yield CALL
        for stage in list(running.values()):
            stage.passed()
        return None


class Running:
    """A stage that is running in this process, its capture and its span of the timeline."""

    def __init__(self, stage: Stage, run: Runtime, who: Who, call: Call, posting: Posting | None) -> None:
        self.step = _step(posting)
        self._run = run
        self._who = who
        self._passed = 0
        self._recording: Capture | None = None
        self._wanted = stage.wanted(run, who, call, posting)
        self._first = 0
        self._stop_before: int | None = None
        if stage.passes and self._wanted is not None:
            self._first, self._stop_before = parse_iterations(self._wanted[1].rollout_iterations)
        if self._first == 0:
            self._record()
        self._span = stage.span(run, who, call, posting)
        running[who] = self

    def passed(self) -> None:
        """A forward pass is through."""
        self._passed += 1
        if self._passed == self._first:
            self._record()
        if self._passed == self._stop_before and self._recording is not None:
            capture.end(self._recording)

    def end(self, error: BaseException | None = None, cut: str = "") -> None:
        """The stage has ended, with the exception that it raised, or early: `cut` says why."""
        if running.get(self._who) is self:
            del running[self._who]
        self._span.end(error)
        if self._recording is not None and cut:
            capture.finish(self._recording, "truncated", cut)
        elif self._recording is not None:
            capture.end(self._recording, error)
        elif self._wanted is not None and self._passed < self._first:
            subject, settings = self._wanted
            Placement(self._run, subject, settings, tools.choose(settings).name).fail(
                f"there were {self._passed} forward passes; recording was to begin after {self._first}"
            )

    def _record(self) -> None:
        if self._wanted is not None:
            self._recording = capture.begin(self._run, *self._wanted)


running: dict[Who, Running] = {}
_whole: list[TimelineSpan] = []


def inside(who: Who, posting: Posting | None) -> bool:
    """Whether a stage that would begin now is part of what is running: of itself, of its role in this step, or of a
    span that is a whole."""
    step = _step(posting)
    return (
        bool(_whole)
        or who in running
        or any(role == who[0] and stage.step == step for (role, _), stage in running.items())
    )


def in_whole() -> bool:
    """Whether a span is running inside of which there is no stage."""
    return bool(_whole)


def _step(posting: Posting | None) -> int | None:
    return posting.step if posting is not None else None


def takes(settings: Settings, role: str, ranks: range) -> bool:
    """Whether the window is for this role, and for one of these global ranks."""
    return settings.takes_role(role) and Ranks.parse(settings.for_role(role).ranks).any_in(ranks)


def own_rank() -> int:
    """The global rank of this process, as torchrun and others like it say it; 0 where there is but one."""
    return int(os.environ.get("RANK") or 0)
