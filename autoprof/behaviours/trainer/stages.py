"""Behaviours of stages: named pieces of work inside a step, in the processes that do the work.

While the user's own profiler is on in a process, autoprof does not record in this process.
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
    """The call starts the target's own profiler, but only in some processes and in some steps.

    Attributes:
        whose: Name of the profiler in messages, such as `verl's own profiler`.
        active: Paths from a parameter of the call to values. If one of these values is true after the call, the
            target's profiler is running in this process.
    """

    whose: str
    active: list[CallPath]

    def around(self, call: Call) -> Around:
        yield CALL
        if runtime.current() is not None and any(call.at(path, False) for path in self.active):
            recorder.suspend(self.whose)
        return None


class NativeStop(Behaviour):
    """The call stops the target's own profiler."""

    def around(self, call: Call) -> Around:
        yield CALL
        recorder.resume()
        return None


class Read(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Option that says how autoprof gets a name, such as the name of a stage, from the call.

    Attributes:
        path: Path from a parameter of the call to the name that the target uses.
        names: Table from patterns, as in fnmatch, to autoprof's names. The first pattern that matches the target's name
            decides. If no pattern matches, the hook ignores the call. Without a table, autoprof uses the target's name.
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
    """Common part of the behaviours of stages and spans.

    Attributes:
        stage: Name of the stage, or a table that says where the call has the name.
        role: Role of the process, such as `actor`, or a table that says where the call has the role.
        rank: Path from a parameter of the call to the global rank. Without this path, the rank is the environment
            variable RANK, or else 0.
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
    """Each call is one stage of the step. The stage is captured if the step's window selects its role and rank.

    A call inside a stage of the same role begins no stage and belongs to the running stage. For example, the forward
    pass of an update computes log-probs, too.

    Attributes:
        passes: True if a `stage.pass` hook counts the stage's forward passes. Then only the passes in
            `AUTOPROF_ROLLOUT_ITERATIONS` are recorded.
        mini_batches: True if `stage.mini-batch` hooks count the stage's mini-batches. Then only the mini-batches in
            `AUTOPROF_MINI_BATCHES` are recorded.
        outermost: True if a call inside a stage of any other role begins no stage either.
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
        """Return a new stage, which the caller begins, or None if the call begins no stage.

        The call begins no stage if autoprof is off in the step, inside an open span with `whole`, while the same stage
        is running, or while a stage of the same role is running in the same step.
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
        """Return the subject and the settings of the stage's capture.

        Return None if the open window does not select the stage's role and rank.
        """
        (role, name), rank = key, stage.rank
        settings = run.settings.overridden(announcement.overrides)
        if not settings.takes(role, range(rank, rank + 1), stage.kind):
            return None
        subject = Subject(step=announcement.step, role=role, stage=name, rank=rank, stage_kind=stage.kind)
        return subject, settings.for_role(role)


class StagePass(Behaviour):
    """The call marks a forward pass, or the end of a mini-batch, in the running stages that count this unit.

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
    """Each call is one mini-batch of the running stages that count mini-batches, and a range in the traces.

    Work between two mini-batches belongs to the earlier mini-batch.
    """

    def idle_unless(self) -> str:
        return "mini_batches"

    def around(self, call: Call) -> Around:
        range_ends = [stage.mini_batch() for stage in list(running.values()) if stage.counts == "mini_batches"]
        yield CALL
        for end_range in filter(None, range_ends):
            end_range()
        return None


def kind_of(call: Call, stage: str) -> str:
    """Return the kind of a stage: the kind that the hook of the call sets, or else the kind for the stage's name."""
    hook = registry.bound.get(call.key)
    return kinds.of(stage) if hook is None else kinds.chosen(hook.hook.kind, stage)


def current_announcement(run: Runtime, call: Call) -> Generator[Wait, Any, StepAnnouncement | None]:
    """Return the announcement of the trainer's current step, or None if no step is announced.

    If no step is open yet and the trainer's hook ticks at the end of a step, open the first step. Unlike
    `step_announcement.here`, this function may ask Ray for the announcement.
    """
    if (opener := open_step.state.open_first) is not None:
        open_step.state.open_first = None
        yield from opener(call)
    local = step_announcement.here()
    if local is not None:
        return local
    announcement: StepAnnouncement | None = yield from ask(step_announcement.read, run.info.id)
    return announcement
