"""Stages and timers that begin and end in two separate calls."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from autoprof.base import seam
from autoprof.behaviours.trainer.running import RunningStage, StageKey, inside, running
from autoprof.behaviours.trainer.spans import plain
from autoprof.behaviours.trainer.stages import Stage, current_announcement, kind_of
from autoprof.capture.subject import Subject
from autoprof.config.settings import Settings
from autoprof.hooks.behaviour import CALL, Around, Behaviour, Call, CallPath
from autoprof.run import runtime, step_announcement
from autoprof.run.runtime import Runtime
from autoprof.run.step_announcement import StepAnnouncement
from autoprof.run.timeline import Span


class StageBegin(Stage):
    """The call opens a stage, which a `stage.end` hook closes.

    If no call closes the stage, it ends with its step, or when it begins again in a later step. Its capture is then
    `truncated`.

    Attributes:
        of: Path from a parameter of the call to an object that the closing call must have, too.
    """

    of: CallPath = ""

    def around(self, call: Call) -> Around:
        run, key = runtime.current(), self.key(call)
        if run is None or key is None:
            yield CALL
            return None
        announcement = yield from current_announcement(run, call)
        off = announcement is not None and announcement.off
        opened = None if off else self._open(run, key, call, announcement)
        if opened is None:
            yield CALL
            return None
        try:
            opened.begin()
            outcome = yield CALL
            if outcome.error is not None:
                opened.end(outcome.error)
        except BaseException as error:
            seam.undo(error, opened.cut)
            raise
        return None

    def _open(
        self, run: Runtime, key: StageKey, call: Call, announcement: StepAnnouncement | None
    ) -> _PairedStage | None:
        step = None if announcement is None else announcement.step
        before = running.get(key)
        if isinstance(before, _PairedStage) and before.step != step:
            before.end(cut="no call ended the stage")
        if inside(key, step):
            return None
        opened = self.run(run, key, call, announcement, _PairedStage)
        assert isinstance(opened, _PairedStage)
        opened.owner = _owner(self.of, call)
        return opened


class SpanBegin(StageBegin):
    """The call opens a span of the timeline, which a `stage.end` hook closes. It is not captured."""

    def wanted(
        self, run: Runtime, key: StageKey, call: Call, announcement: StepAnnouncement
    ) -> tuple[Subject, Settings] | None:
        return None


class StageEnd(Behaviour):
    """The return of the call closes a stage that a `stage.begin` hook opened: the latest one that matches.

    Attributes:
        of: Path from a parameter of the call to the object that the opening call had at its `of`.
        stage: Name that the stage must have, if given.
        role: Role that the stage must have, if given.
    """

    of: CallPath = ""
    stage: str = ""
    role: str = ""

    def around(self, call: Call) -> Around:
        stage: _PairedStage | None = None
        try:
            outcome = yield CALL
            stage = self._fitting(call)
            if stage is not None:
                stage.end(outcome.error)
        except BaseException as error:
            seam.undo(error, partial(self._cut, stage, call))
            raise
        return None

    def _cut(self, stage: _PairedStage | None, call: Call) -> None:
        if (stage := stage or self._fitting(call)) is not None:
            stage.cut()

    def _fitting(self, call: Call) -> _PairedStage | None:
        owner = _owner(self.of, call)
        for (role, name), stage in reversed(list(running.items())):
            fits = self.role in ("", role) and self.stage in ("", name)
            if fits and isinstance(stage, _PairedStage) and stage.owner is owner:
                return stage
        return None


class _PairedStage(RunningStage):
    """A running stage that another call must end. `owner` is the object that both calls have in common."""

    owner: Any = None


def end_all() -> None:
    """End the stages that no call has ended, with their step."""
    for stage in [stage for stage in running.values() if isinstance(stage, _PairedStage)]:
        stage.end(cut="the step ended before the stage")


def _owner(path: str, call: Call) -> Any:
    return call.at(path) if path else None


# Attribute of a running timer: its span.
_SPAN = "_autoprof_span"


class TimerStart(Behaviour):
    """The call starts a timer, which a `timer.stop` hook stops. Timers may nest and overlap.

    A timer is a span of the step in which it starts. If it starts before a step and stops in it, it is a span of that
    step. Other timers, such as those in processes without a trainer, are ignored.

    Attributes:
        of: Path from a parameter of the call to the timer.
        timer: Path to the timer's name. Timers without a name are ignored.
        role: Role of the timed work.
    """

    makes_stages: ClassVar[bool] = True
    of: CallPath = "self"
    timer: CallPath = "self.name"
    role: str = "trainer"

    def around(self, call: Call) -> Around:
        run = runtime.current()
        _, announcement = step_announcement.own()
        name = None if run is None or (announcement is not None and announcement.off) else call.at(self.timer, None)
        yield CALL
        if run is not None and name:
            step = None if announcement is None else announcement.step
            name = str(plain(name))
            kind = kind_of(call, name)
            span = Span(run.timeline, "timer", name, step=step, role=self.role, rank=None, stage_kind=kind)
            setattr(call.at(self.of), _SPAN, (span, step))
            run.timeline.running.add(span)
        return None


class TimerStop(Behaviour):
    """The call stops a timer that a `timer.start` started.

    Attributes:
        of: Path from a parameter of the call to the timer.
    """

    of: CallPath = "self"

    def around(self, call: Call) -> Around:
        timer: Any = call.at(self.of)
        started: tuple[Span, int | None] | None = vars(timer).pop(_SPAN, None)
        if started is None:
            yield CALL
            return None
        span, step = started
        try:
            outcome = yield CALL
            _, announcement = step_announcement.own()
            if step is None and announcement is not None and not announcement.off:
                step = announcement.step
            if step is None:
                span.drop()
            else:
                span.end(outcome.error, step=step)
        except BaseException as error:
            seam.undo(error, span.drop)
            raise
        return None
