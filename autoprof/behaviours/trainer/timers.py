"""Timers of a trainer's own, in its process: each start and stop is a span of the timeline."""

from __future__ import annotations

from typing import Any, ClassVar

from autoprof.base import interrupts
from autoprof.behaviours.trainer.spans import plain
from autoprof.behaviours.trainer.stages import kind_of
from autoprof.hooks.attribute_path import CallPath
from autoprof.hooks.behaviour import Behaviour
from autoprof.hooks.call import CALL, Around, Call
from autoprof.run import runtime
from autoprof.run.cluster import current_step
from autoprof.run.span import Span

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
        _, posting = current_step.own()
        name = None if run is None or (posting is not None and posting.off) else call.at(self.timer, None)
        yield CALL
        if run is not None and name:
            step = None if posting is None else posting.step
            name = str(plain(name))
            kind = kind_of(call, name)
            span = Span(run.timeline, "timer", name, step=step, role=self.role, rank=None, stage_kind=kind)
            setattr(call.at(self.of), _SPAN, (span, step))
            run.timeline.going.add(span)
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
            _, posting = current_step.own()
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
