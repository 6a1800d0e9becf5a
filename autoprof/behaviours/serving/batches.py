"""Generation batches, the steps of an engine without a trainer.

A batch lasts from the first request that an idle engine gets to the moment when it has none left, which for a trainer
that sends its prompts over HTTP is one rollout. Batches are counted from 1, and `AUTOPROF_STEPS` chooses.
"""

from __future__ import annotations

from typing import Any

from autoprof.base.originals import time
from autoprof.behaviours.rollout.request import ROLE, Request
from autoprof.run import end, runtime
from autoprof.run.span import Span
from autoprof.windows.chooser import Chooser

# How often a busy server looks whether somebody asked for a window: with the first request after so many seconds.
_LOOK_S = 1.0


class Batches:
    """The generation batches of one engine: counted, each a step of the timeline.

    Attributes:
        are_steps: False where a trainer of the same run counts its steps, and takes what is asked for.
    """

    def __init__(self) -> None:
        self.count = 0
        self.are_steps = True
        self._span: Span | None = None
        self._last_window = False
        self._chooser = Chooser()
        self._looked = 0.0

    @property
    def going_on(self) -> bool:
        return self._span is not None

    @property
    def overdue(self) -> bool:
        """Return whether nobody has looked for some time for requests of `autoprof trigger`."""
        return time.monotonic() - self._looked > _LOOK_S

    def look(self, run: runtime.Runtime, led: bool = False) -> None:
        """Take the requests of `autoprof trigger`: `+1` is the batch that is going on, or else the next.

        Where the engine is `led`, a trainer opens its windows, and nobody else.
        """
        self._looked = time.monotonic()
        if not self.are_steps:  # they are the trainer's
            return
        self._chooser.look(run.rundir, self.count - self.going_on)
        if led:
            self._chooser.close("a trainer decides what this server records; use autoprof trigger on the trainer's run")

    def asked(self, run: runtime.Runtime) -> Request | None:
        """Return the request to the engine if a trigger chose this batch."""
        overrides = self._chooser.asked(run.settings, self.count, self.count)
        return None if overrides is None else self._request(overrides)

    def begin(self, run: runtime.Runtime) -> Request | None:
        """Begin a batch; return the request to the engine if it is chosen, by `AUTOPROF_STEPS` or by a trigger."""
        self.count += 1
        # The numbers of batches are no steps of the trainer's.
        kind = "step" if self.are_steps else "batch"
        self._span = Span(run.timeline, kind, kind, step=self.count, role=ROLE, rank=None)
        if not self.are_steps:
            return None
        self._chooser.step_began(run, self.count, self.count)
        overrides = self._chooser.choose(run.settings, self.count, self.count)
        if overrides is None:
            return None
        self._last_window = not self._chooser.any_after(run.settings, self.count, self.count)
        return self._request(overrides)

    def end(self) -> None:
        """End the batch, whose recording is stopped."""
        span, self._span = self._span, None
        if span is not None and self.are_steps:
            span.end()
            self._chooser.step_ended(self.count, self.count)
        elif span is not None:
            span.drop()
        self._chooser.ended()
        run = runtime.current()
        if self._last_window and run is not None:
            self._last_window = False
            end.window_passed(run)

    def _request(self, overrides: dict[str, Any]) -> Request:
        return Request(action="start", step=self.count, overrides=overrides)
