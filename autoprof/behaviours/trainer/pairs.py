"""Stages and timers that begin and end in two separate calls."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from autoprof.behaviours.trainer.running import RunningStage, StageKey, running
from autoprof.behaviours.trainer.spans import plain
from autoprof.behaviours.trainer.stages import Stage, kind_of
from autoprof.capture.artifacts import Subject
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

    def stage_of(
        self, run: Runtime, key: StageKey, call: Call, announcement: StepAnnouncement | None
    ) -> RunningStage | None:
        step = None if announcement is None else announcement.step
        before = running.get(key)
        if before is not None and before.paired and before.step != step:
            before.abort("no call ended the stage")
        opened = super().stage_of(run, key, call, announcement)
        if opened is not None:
            opened.paired, opened.owner = True, _owner(self.of, call)
        return opened


class SpanBegin(StageBegin):
    """The call opens a span of the timeline, which a `stage.end` hook closes. It is not captured."""

    def wanted(
        self, run: Runtime, key: StageKey, stage: RunningStage, announcement: StepAnnouncement
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
        call.on_interrupt = partial(self._abort, call)
        outcome = yield CALL
        stage = self._fitting(call)
        if stage is not None:
            call.on_interrupt = stage.abort
            stage.stop(outcome.error)
        return None

    def _abort(self, call: Call) -> None:
        if (stage := self._fitting(call)) is not None:
            stage.abort()

    def _fitting(self, call: Call) -> RunningStage | None:
        owner = _owner(self.of, call)
        for (role, name), stage in reversed(list(running.items())):
            fits = self.role in ("", role) and self.stage in ("", name)
            if fits and stage.paired and stage.owner is owner:
                return stage
        return None


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
        call.on_interrupt = span.drop
        outcome = yield CALL
        _, announcement = step_announcement.own()
        if step is None and announcement is not None and not announcement.off:
            step = announcement.step
        if step is None:
            span.drop()
        else:
            span.end(outcome.error, step=step)
        return None
