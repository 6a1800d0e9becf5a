"""Behaviours of stages: named pieces of work inside a step, in the processes that do the work.

While the user's own profiler is on in a process, autoprof does not record there.
"""

from __future__ import annotations

from collections.abc import Generator
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Literal

import msgspec

from autoprof.base import identity
from autoprof.behaviours.trainer import open_step
from autoprof.behaviours.trainer.running import Counted, RunningStage, StageKey, running, wholes
from autoprof.capture import recorder
from autoprof.capture.artifacts import Subject
from autoprof.config import kinds
from autoprof.config.settings import Settings
from autoprof.hooks import registry
from autoprof.hooks.behaviour import CALL, Around, Behaviour, Call, CallPath, Wait
from autoprof.hooks.dispatch import ask
from autoprof.run import runtime, step_announcement
from autoprof.run.runtime import Runtime
from autoprof.run.step_announcement import StepAnnouncement


class NativeStart(Behaviour):
    """The call opens the target's own profiler, in some processes and steps only.

    Attributes:
        whose: Name of the profiler in messages, such as `verl's own profiler`.
        active: Paths from a parameter of the call. If the value of one is true after the call, the profiler is open in
            this process.
    """

    whose: str
    active: list[CallPath]

    def around(self, call: Call) -> Around:
        yield CALL
        if runtime.current() is not None and any(call.at(path, False) for path in self.active):
            recorder.suspend(self.whose)
        return None


class NativeStop(Behaviour):
    """The call closes the target's own profiler."""

    def around(self, call: Call) -> Around:
        yield CALL
        recorder.resume()
        return None


class Read(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A name that is read from the call.

    Attributes:
        path: Path from a parameter of the call to the target's name.
        names: Table from patterns of the target's names, as in fnmatch, to autoprof's names. The first matching pattern
            decides. If none matches, the hook ignores the call. Without a table, the target's name is used.
    """

    path: CallPath
    names: dict[str, str] = {}

    def of(self, call: Call) -> str:
        """Return the name for this call, or an empty string if the hook ignores the call."""
        target_name = str(call.at(self.path, ""))
        if not self.names:
            return target_name
        return next((name for pattern, name in self.names.items() if fnmatchcase(target_name, pattern)), "")


class NamedCall(Behaviour):
    """Common part of stages and spans.

    Attributes:
        stage: Name of the stage, or a table that reads the name from the call.
        role: Role of the process, such as `actor`, or a table that reads it from the call.
        rank: Path from a parameter of the call to the global rank. Without it, the variable RANK, or else 0.
    """

    makes_stages: ClassVar[bool] = True
    stage: str | Read
    role: str | Read
    rank: CallPath = ""

    def key(self, call: Call) -> StageKey | None:
        """Return the role and the name of the call's stage, or None if the hook ignores the call."""
        role = self.role if isinstance(self.role, str) else self.role.of(call)
        stage = self.stage if isinstance(self.stage, str) else self.stage.of(call)
        return (role, stage) if role and stage else None

    def concerns(self, call: Call) -> bool:
        return self.key(call) is not None

    def rank_of(self, call: Call) -> int:
        """Return the global rank of this process."""
        return int(call.at(self.rank)) if self.rank else identity.own_rank()


class Stage(NamedCall):
    """One call is a stage of the step. It is captured if the window is open for its role and rank.

    A call inside a stage of the same role is part of that stage: the forward pass of an update computes log-probs, too.

    Attributes:
        passes: True if a `stage.pass` hook counts the stage's forward passes. Then only the passes in
            `AUTOPROF_ROLLOUT_ITERATIONS` are recorded.
        mini_batches: True if `stage.mini-batch` hooks count the stage's mini-batches. Then `AUTOPROF_MINI_BATCHES` may
            select a part of them.
        outermost: True if a call inside a stage of another role is part of that stage, too.
    """

    passes: bool = False
    mini_batches: bool = False
    outermost: bool = False

    def around(self, call: Call) -> Around:
        run, key = runtime.current(), self.key(call)
        if run is None or key is None or (self.outermost and running):
            yield CALL
            return None
        announcement = step_announcement.here()
        if announcement is None:
            announcement = yield from current_announcement(run, call)
        stage = self.stage_of(run, key, call, announcement)
        if stage is None:
            yield CALL
            return None
        call.on_interrupt = stage.abort
        window = announcement if announcement is not None and announcement.captured else None
        stage.begin(None if window is None else self.wanted(run, key, stage, window))
        outcome = yield CALL
        if outcome.error is not None or not stage.paired:
            stage.stop(outcome.error)
        return None

    def stage_of(
        self, run: Runtime, key: StageKey, call: Call, announcement: StepAnnouncement | None
    ) -> RunningStage | None:
        """Return the stage, not yet begun, or None if the call is no stage or part of a running one.

        It is part of the same stage, of a stage with the same role in this step, or of an open span with `whole`.
        """
        off, step = (False, None) if announcement is None else (announcement.off, announcement.step)
        if off or wholes or key in running:
            return None
        if any(role == key[0] and stage.step == step for (role, _), stage in running.items()):
            return None
        counts: Counted = "passes" if self.passes else "mini_batches" if self.mini_batches else ""
        return RunningStage(run, key, step, self.rank_of(call), kind_of(call, key[1]), counts)

    def wanted(
        self, run: Runtime, key: StageKey, stage: RunningStage, announcement: StepAnnouncement
    ) -> tuple[Subject, Settings] | None:
        """Return the subject and the settings of the capture, if the open window takes this role and rank."""
        (role, name), rank = key, stage.rank
        settings = run.settings.overridden(announcement.overrides)
        if not settings.takes(role, range(rank, rank + 1), stage.kind):
            return None
        subject = Subject(step=announcement.step, role=role, stage=name, rank=rank, stage_kind=stage.kind)
        return subject, settings.for_role(role)


class StagePass(Behaviour):
    """The call is made once in each forward pass, or at the end of each mini-batch, of the stages that count them.

    Attributes:
        counted: Unit that the hook counts.
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
    """The call is one mini-batch of the stages that count them, and a range in their traces.

    Work between two mini-batches belongs to the first.
    """

    def idle_unless(self) -> str:
        return "mini_batches"

    def around(self, call: Call) -> Around:
        ends = [stage.mini_batch() for stage in list(running.values()) if stage.counts == "mini_batches"]
        yield CALL
        for end in filter(None, ends):
            end()
        return None


def kind_of(call: Call, stage: str) -> str:
    """Return the kind of a stage, from the hook of the call."""
    hook = registry.bound.get(call.key)
    return kinds.of(stage) if hook is None else kinds.chosen(hook.hook.kind, stage)


def current_announcement(run: Runtime, call: Call) -> Generator[Wait, Any, StepAnnouncement | None]:
    """Return the announcement of the trainer's current step, or None. Open the first step first, if necessary.

    May ask Ray for it. `step_announcement.here` does not.
    """
    if (opener := open_step.state.open_first) is not None:
        open_step.state.open_first = None
        yield from opener(call)
    local = step_announcement.here()
    if local is not None:
        return local
    announcement: StepAnnouncement | None = yield from ask(step_announcement.read, run.info.id)
    return announcement
