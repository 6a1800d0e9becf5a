"""Stages: named pieces of work inside a step, in the processes that do them.

While the user's own profiler is on in a process, autoprof does not record there.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Literal

import msgspec

from autoprof.base import identity, interrupts, process
from autoprof.behaviours.trainer.running import Counted, Running, Who, inside, running, step_of
from autoprof.capture import lifecycle
from autoprof.capture.subject import Subject
from autoprof.config import kinds
from autoprof.config.settings import Settings
from autoprof.hooks import registry
from autoprof.hooks.behaviour import CALL, Around, Behaviour, Call, CallPath, Wait
from autoprof.hooks.dispatch import ask
from autoprof.run import runtime, step_announcement
from autoprof.run.runtime import Runtime
from autoprof.run.step_announcement import StepAnnouncement
from autoprof.run.timeline import Span


class Start(Behaviour):
    """The call opens the target's own profiler, for some processes and steps only.

    Attributes:
        whose: Whose profiler it is, in words.
        active: Paths of which one is true after the call where the profiler is open in this process.
    """

    whose: str
    active: list[CallPath]

    def around(self, call: Call) -> Around:
        yield CALL
        if runtime.current() is not None and any(call.at(path, False) for path in self.active):
            lifecycle.suspend(self.whose)
        return None


class Stop(Behaviour):
    """The call closes the target's own profiler."""

    def around(self, call: Call) -> Around:
        yield CALL
        lifecycle.resume()
        return None


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
        """Return the name for this call, or an empty text where it is none of the hook's."""
        found = str(call.at(self.path, ""))
        if not self.names:
            return found
        return next((name for pattern, name in self.names.items() if fnmatchcase(found, pattern)), "")


class Named(Behaviour):
    """Common part of stages and spans.

    Attributes:
        stage: The stage's name, the target's own; or where it is read from the call.
        role: Who does it; or where that is read from the call.
        rank: Path from a parameter of the call to the global rank; without it the variable RANK, else 0.
    """

    makes_stages: ClassVar[bool] = True
    stage: str | Read
    role: str | Read
    rank: CallPath = ""

    def who(self, call: Call) -> Who | None:
        """Return the role and the name of the stage that the call is, or None where the hook is not for it."""
        role = self.role if isinstance(self.role, str) else self.role.of(call)
        stage = self.stage if isinstance(self.stage, str) else self.stage.of(call)
        return (role, stage) if role and stage else None

    def concerns(self, call: Call) -> bool:
        return self.who(call) is not None

    def rank_of(self, call: Call) -> int:
        """Return the global rank of this process."""
        return int(call.at(self.rank)) if self.rank else identity.own_rank()

    def span(self, run: Runtime, who: Who, call: Call, posting: StepAnnouncement | None) -> Span:
        """Return the span of the timeline, which begins now."""
        rank, kind = self.rank_of(call), kind_of(call, who[1])
        return Span(run.timeline, "stage", who[1], step=step_of(posting), role=who[0], rank=rank, stage_kind=kind)


class Stage(Named):
    """One call is a stage of the step, captured when the window is open for its role and rank.

    A call inside a stage of the same role is part of it: the forward pass of an update computes log-probs, too.

    Attributes:
        passes: Whether a `stage.pass` hook counts forward passes inside of it. Those of `AUTOPROF_ROLLOUT_ITERATIONS`
            are recorded then, not the whole.
        mini_batches: Whether `stage.mini-batch` hooks count mini-batches inside of it, of which `AUTOPROF_MINI_BATCHES`
            may ask for a part.
        outermost: Whether a call inside a stage of another role is part of that one, too.
    """

    passes: bool = False
    mini_batches: bool = False
    outermost: bool = False

    def around(self, call: Call) -> Around:
        run, who = runtime.current(), self.who(call)
        if run is None or who is None or (self.outermost and running):
            yield CALL
            return None
        posting = yield from posted(run, call)
        off = posting is not None and posting.off
        if off or inside(who, posting):
            yield CALL
            return None
        stage = self.run(run, who, call, posting)
        try:
            stage.begin()
            outcome = yield CALL
            stage.end(outcome.error)
        except BaseException as error:
            interrupts.undo(error, stage.cut)
            raise
        return None

    def run(
        self, run: Runtime, who: Who, call: Call, posting: StepAnnouncement | None, kind: type[Running] = Running
    ) -> Running:
        """Return the stage, which has not begun."""
        counts: Counted = "passes" if self.passes else "mini_batches" if self.mini_batches else ""
        wanted = self.wanted(run, who, call, posting)
        return kind(run, who, posting, wanted, counts, lambda: self.span(run, who, call, posting))

    def wanted(
        self, run: Runtime, who: Who, call: Call, posting: StepAnnouncement | None
    ) -> tuple[Subject, Settings] | None:
        """Return the subject and the settings of the capture, if the window is open for this role and rank."""
        if posting is None or not posting.captured:
            return None
        role, rank, kind = who[0], self.rank_of(call), kind_of(call, who[1])
        settings = run.settings.overridden(posting.overrides)
        if not settings.takes(role, range(rank, rank + 1), kind):
            return None
        return Subject(step=posting.step, role=role, stage=who[1], rank=rank, stage_kind=kind), settings.for_role(role)


class Pass(Behaviour):
    """The call is made once in each forward pass of the stages that count them, or as the last of each mini-batch.

    Attributes:
        counted: What it counts.
    """

    counted: Literal["passes", "mini_batches"] = "passes"

    def idle_unless(self) -> str:
        return self.counted

    def around(self, call: Call) -> Around:
        yield CALL
        for stage in list(running.values()):
            if stage.counts == self.counted:
                stage.passed()
        return None


class MiniBatch(Behaviour):
    """The call is one mini-batch of the stages that count them, and a range of their traces. What comes between two of
    them belongs to the first.
    """

    def idle_unless(self) -> str:
        return "mini_batches"

    def around(self, call: Call) -> Around:
        ends = [stage.mini_batch() for stage in list(running.values()) if stage.counts == "mini_batches"]
        yield CALL
        for end in filter(None, ends):
            end()
        return None


class _State(process.State):
    """What opens the first step before the first stage, where a tick at the end of each step would be too late."""

    def begin(self) -> None:
        self.open_first: Callable[[Call], Generator[Wait, Any, None]] | None = None

    def in_child(self) -> None:
        self.open_first = None


_state = _State()


def open_first_step_by(opener: Callable[[Call], Generator[Wait, Any, None]] | None) -> None:
    """Have the first stage or span of this process open the first step."""
    _state.open_first = opener


def kind_of(call: Call, stage: str) -> str:
    """Return the kind of a stage that the call is, by its hook."""
    hook = registry.bound.get(call.key)
    return kinds.of(stage) if hook is None else kinds.chosen(hook.hook.kind, stage)


def posted(run: Runtime, call: Call) -> Generator[Wait, Any, StepAnnouncement | None]:
    """Return the step that the trainer is in."""
    if (opener := _state.open_first) is not None:
        _state.open_first = None
        yield from opener(call)
    known = step_announcement.here()
    if known is not None:
        return known
    posting: StepAnnouncement | None = yield from ask(step_announcement.read, run.info.id)
    return posting
