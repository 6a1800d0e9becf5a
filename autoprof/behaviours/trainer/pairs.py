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

    If no call closes the stage, the stage ends when its step ends, or when the same stage begins in a later step. The
    state of its capture is then `truncated`.

    Attributes:
        of: Path from a parameter of the call to an object. The call that closes the stage must have the same object at
            the path in its own `of`.
    """

    of: CallPath = ""

    def stage_of(
        self, run: Runtime, key: StageKey, call: Call, announcement: StepAnnouncement | None
    ) -> RunningStage | None:
        step = None if announcement is None else announcement.step
        earlier_stage = running.get(key)
        if earlier_stage is not None and earlier_stage.paired and earlier_stage.step != step:
            earlier_stage.abort("no call ended the stage")
        opened = super().stage_of(run, key, call, announcement)
        if opened is not None:
            opened.paired, opened.owner = True, _owner(self.of, call)
        return opened


class SpanBegin(StageBegin):
    """The call opens a span on the timeline, which a `stage.end` hook closes. The span is not captured."""

    def wanted(
        self, run: Runtime, key: StageKey, stage: RunningStage, announcement: StepAnnouncement
    ) -> tuple[Subject, Settings] | None:
        return None


class StageEnd(Behaviour):
    """When the call returns, autoprof closes the latest open stage of a `stage.begin` hook that matches the options.

    Attributes:
        of: Path from a parameter of the call to an object. The call that opened the stage must have had the same object
            at the path in its own `of`.
        stage: Name of the stage to close. Default: any name.
        role: Role of the stage to close. Default: any role.
    """

    of: CallPath = ""
    stage: str = ""
    role: str = ""

    def around(self, call: Call) -> Around:
        call.on_interrupt = partial(self._abort, call)
        outcome = yield CALL
        stage = self._matching_stage(call)
        if stage is not None:
            call.on_interrupt = stage.abort
            stage.stop(outcome.error)
        return None

    def _abort(self, call: Call) -> None:
        if (stage := self._matching_stage(call)) is not None:
            stage.abort()

    def _matching_stage(self, call: Call) -> RunningStage | None:
        owner = _owner(self.of, call)
        for (role, name), stage in reversed(list(running.items())):
            matches = self.role in ("", role) and self.stage in ("", name)
            if matches and stage.paired and stage.owner is owner:
                return stage
        return None


def _owner(path: str, call: Call) -> Any:
    return call.at(path) if path else None


# Attribute of a running timer that holds its span, and the number of the step in which the timer started, or None.
_SPAN = "_autoprof_span"


class TimerStart(Behaviour):
    """The call starts a timer, which a `timer.stop` hook stops. Timers may nest and overlap.

    A timer is a span of the step in which the timer starts. If no step is open at the start, the timer is a span of the
    step in which the timer stops. If no step is open at the start and at the stop, as in processes without a trainer,
    the timer is ignored.

    Attributes:
        of: Path from a parameter of the call to the timer.
        timer: Path from a parameter of the call to the timer's name. Timers without a name are ignored.
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
    """The call stops a timer that a `timer.start` hook started.

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
