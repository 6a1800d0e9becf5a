"""Stages and timers that begin and end in two separate calls."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from autoprof.base import interrupts
from autoprof.behaviours.trainer.running import Running, Who, inside, running
from autoprof.behaviours.trainer.spans import plain
from autoprof.behaviours.trainer.stages import Stage, kind_of, posted
from autoprof.capture.subject import Subject
from autoprof.config.settings import Settings
from autoprof.hooks.behaviour import CALL, Around, Behaviour, Call, CallPath
from autoprof.run import runtime, step_announcement
from autoprof.run.runtime import Runtime
from autoprof.run.step_announcement import StepAnnouncement
from autoprof.run.timeline import Span


class Begin(Stage):
    """The call opens a stage, which a `stage.end` closes.

    A stage whose end never comes ends with its step, or where it begins in a later step. Its capture is `truncated`
    then.

    Attributes:
        of: Path from a parameter of the call to what its end has in common with it: only an end with the same object
            there closes the stage.
    """

    of: CallPath = ""

    def around(self, call: Call) -> Around:
        run, who = runtime.current(), self.who(call)
        if run is None or who is None:
            yield CALL
            return None
        posting = yield from posted(run, call)
        off = posting is not None and posting.off
        opened = None if off else self._open(run, who, call, posting)
        if opened is None:
            yield CALL
            return None
        try:
            opened.begin()
            outcome = yield CALL
            if outcome.error is not None:
                opened.end(outcome.error)
        except BaseException as error:
            interrupts.undo(error, opened.cut)
            raise
        return None

    def _open(self, run: Runtime, who: Who, call: Call, posting: StepAnnouncement | None) -> _Opened | None:
        before = running.get(who)
        if isinstance(before, _Opened) and before.step != (posting.step if posting is not None else None):
            before.end(cut="its end never came")
        if inside(who, posting):
            return None
        opened = self.run(run, who, call, posting, _Opened)
        assert isinstance(opened, _Opened)
        opened.owner = _owner(self.of, call)
        return opened


class SpanBegin(Begin):
    """The call opens a span of the timeline, which a `stage.end` closes; it is not captured."""

    def wanted(
        self, run: Runtime, who: Who, call: Call, posting: StepAnnouncement | None
    ) -> tuple[Subject, Settings] | None:
        return None


class End(Behaviour):
    """When the call has returned, the stage ends that was opened last by a `stage.begin`, of those that fit.

    Attributes:
        of: As in `stage.begin`: only a stage of the same object.
        stage: Only a stage of this name.
        role: Only a stage of this role.
    """

    of: CallPath = ""
    stage: str = ""
    role: str = ""

    def around(self, call: Call) -> Around:
        stage: _Opened | None = None
        try:
            outcome = yield CALL
            stage = self._fitting(call)
            if stage is not None:
                stage.end(outcome.error)
        except BaseException as error:
            interrupts.undo(error, partial(self._cut, stage, call))
            raise
        return None

    def _cut(self, stage: _Opened | None, call: Call) -> None:
        if (stage := stage or self._fitting(call)) is not None:
            stage.cut()

    def _fitting(self, call: Call) -> _Opened | None:
        owner = _owner(self.of, call)
        for (role, name), stage in reversed(list(running.items())):
            fits = self.role in ("", role) and self.stage in ("", name)
            if fits and isinstance(stage, _Opened) and stage.owner is owner:
                return stage
        return None


class _Opened(Running):
    """A running stage that a call of its own has to end."""

    owner: Any = None


def end_all() -> None:
    """End the stages whose end never came, with their step."""
    for stage in [stage for stage in running.values() if isinstance(stage, _Opened)]:
        stage.end(cut="the step ended before the stage")


def _owner(path: str, call: Call) -> Any:
    return call.at(path) if path else None


# Set on a timer while it runs: its span.
_SPAN = "_autoprof_span"


class Start(Behaviour):
    """The call starts a timer, which a `timer.stop` stops. Timers may nest and run beside each other.

    What is timed in a step is a span of it, and so is what begins right before the step and ends in it. In processes
    without a trainer timers are left alone.

    Attributes:
        of: Path from a parameter of the call to the timer.
        timer: Path to the timer's name; timers without one are left alone.
        role: Who does what is timed.
    """

    makes_stages: ClassVar[bool] = True
    of: CallPath = "self"
    timer: CallPath = "self.name"
    role: str = "trainer"

    def around(self, call: Call) -> Around:
        run = runtime.current()
        _, posting = step_announcement.own()
        name = None if run is None or (posting is not None and posting.off) else call.at(self.timer, None)
        yield CALL
        if run is not None and name:
            step = None if posting is None else posting.step
            name = str(plain(name))
            kind = kind_of(call, name)
            span = Span(run.timeline, "timer", name, step=step, role=self.role, rank=None, stage_kind=kind)
            setattr(call.at(self.of), _SPAN, (span, step))
            run.timeline.running.add(span)
        return None


class Stop(Behaviour):
    """The call stops a timer that a `timer.start` started.

    Attributes:
        of: As in `timer.start`.
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
            _, posting = step_announcement.own()
            if step is None and posting is not None and not posting.off:
                step = posting.step
            if step is None:
                span.drop()
            else:
                span.end(outcome.error, step=step)
        except BaseException as error:
            interrupts.undo(error, span.drop)
            raise
        return None
