"""Open trigger requests in the process that counts the steps."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from autoprof.base import interrupts, log
from autoprof.config import values
from autoprof.config.selection import Steps
from autoprof.rundir import layout
from autoprof.rundir.layout import RunDir
from autoprof.windows import requests
from autoprof.windows.requests import Became, Bell, Folder, Trigger

REASON = "autoprof trigger"


class OpenTriggers:
    """Requests that this process has taken and that are not over.

    Attributes:
        off: True if autoprof was switched off in the run at the last look.
    """

    def __init__(self) -> None:
        self.off = False
        self._open: list[_Window] = []
        self._folder = Folder()
        self._bell = Bell()
        self._read: set[str] = set()

    def look(self, run: RunDir, executed: int, take_it: bool = True) -> None:
        """Take the requests since the last look.

        Args:
            run: The run.
            executed: Number of steps before the step `+1`.
            take_it: False in a further rank of the same trainer. It only reads the requests; the first rank takes them.
        """
        changed = self._folder.look(run)
        if changed:
            self.off = layout.OFF in self._folder.names
        if not take_it:
            for name, trigger, begun in requests.read_along(run, self._folder.names, self._read) if changed else ():
                if not trigger.switch:
                    self._add(_Window(None, name, trigger, executed, begun))
            return
        taken = self._bell.take(run)
        if changed:
            taken += requests.take(run, self._folder.names)
        for name, trigger in taken:
            if trigger.switch:
                _switch(run, name, trigger)
                self.off = layout.switched_off(run)
            else:
                self._add(_Window(run, name, trigger, executed))

    def match(self, step: int, ordinal: int, against: str = "", for_good: bool = False) -> dict[str, Any] | None:
        """Return the settings with which a request captures `step`, or None if no request does.

        If windows overlap, the newest decides. An older window that asks for a number of steps is continued after it.

        Args:
            step: The global step.
            ordinal: Its number in this run, from 1.
            against: Reason why the step is not captured, even if a request asks for it; empty for none.
            for_good: True if, for this reason, no later step is captured either.
        """
        matching = []
        for window in self._open:
            window.before(step)
            if window.wants(step, ordinal):
                matching.append(window)
        for window in matching:
            if not against and (window is matching[-1] or window.steps is not None):
                window.begin(step)
        for window in self._open:
            window.passed(step, ordinal, against, for_good)
        self._keep()
        return matching[-1].overrides if matching and not against else None

    def foresee(self, step: int, ordinal: int) -> dict[str, Any] | None:
        """Return the settings that `match` would return for a step, by the current requests."""
        overrides = None
        for window in self._open:
            if window.wants(step, ordinal):
                overrides = window.overrides
        return overrides

    def ended(self) -> None:
        """Note that the current step and its captures have ended."""
        for window in self._open:
            window.end()
        self._keep()

    def close(self, reason: str) -> None:
        """Close all requests."""
        for window in self._open:
            window.close(reason)
        self._keep()

    @property
    def any_to_come(self) -> bool:
        """True if a request asks for a step after the current one."""
        return any(window.to_come for window in self._open)

    def _keep(self) -> None:
        for window in self._open:
            window.note()
        self._open = [window for window in self._open if not window.became.over]

    def _add(self, window: _Window) -> None:
        for other in self._open:
            if other.trigger == window.trigger:
                log.info(f"request {window.name} joins {other.name}, which asks for the same")
                window.became = Became(state="joined", joined=other.name)
                window.note()
                return
        self._open.append(window)


class _Window:
    """Window of one request.

    Attributes:
        steps: The steps of `Trigger.at`; None if the request asks for a number of steps.
        to_come: True if a later step may belong to it.
        became: Its state.
    """

    def __init__(
        self, run: RunDir | None, name: str, trigger: Trigger, executed: int, begun: Sequence[int] = ()
    ) -> None:
        self.name = name
        self.trigger = trigger
        self.steps = Steps.parse(trigger.at) if trigger.at else None
        self.to_come = True
        self.became = Became()
        # None if another process writes the state of the request.
        self._run = run
        self._executed = executed
        # Number of steps still to capture.
        self._left = trigger.steps
        # Steps that the process that took the request has already begun.
        self._begun = begun
        self._noted: Became | None = None

    @property
    def overrides(self) -> dict[str, Any]:
        """Settings of its captures, with their reason."""
        return self.trigger.overrides | {values.REASON: self.trigger.reason or REASON}

    def before(self, step: int) -> None:
        """Prepare for `step`. Earlier steps that the other process has begun count as captured."""
        if self.became.going_on != step:
            self.end()
        self._left -= sum(number < step for number in self._begun)
        self._begun = ()

    def wants(self, step: int, ordinal: int) -> bool:
        """Return True if `step` belongs to it, and is not already being captured."""
        if self.became.going_on == step:
            return False
        if self.steps is not None:
            return self.steps.match(step, ordinal - self._executed)
        return self._left > 0 and step >= (self.trigger.since or 0)

    def begin(self, step: int) -> None:
        """Count `step` as captured."""
        self._left -= 1
        self.became.state = "open"
        self.became.going_on = step

    def passed(self, step: int, ordinal: int, against: str, for_good: bool) -> None:
        """Note that `step` has begun, captured or not. `against` and `for_good`: as in `OpenTriggers.match`."""
        if self.steps is not None:
            if against and self.steps.match(step, ordinal - self._executed):
                self.became.reason = f"step {step}: {against}"
            self.to_come = self.steps.any_after(step, ordinal - self._executed)
        else:
            self.to_come = self._left > 0
        if self.to_come and for_good:
            self.close(against)
        self._close()

    def close(self, reason: str) -> None:
        """Capture no further steps, for this reason."""
        self.to_come = False
        self.became.reason = reason
        self._close()

    def end(self) -> None:
        """Note that the capture of the current step has ended, if any."""
        if self.became.going_on is not None:
            self.became.captured.append(self.became.going_on)
            self.became.going_on = None
            self._close()

    def _close(self) -> None:
        if self.to_come or self.became.going_on is not None:
            return
        self.became.state = "done"
        if not self.became.captured and not self.became.reason:
            self.became.reason = "its steps had passed when it was taken"

    def note(self) -> None:
        """Write its state, if it has changed."""
        if self._run is not None and self.became != self._noted:
            requests.note(self._run, self.name, self.trigger, self.became)
            self._noted = copy.deepcopy(self.became)


def _switch(run: RunDir, name: str, trigger: Trigger) -> None:
    became = Became(state="done")
    try:
        requests.switch(run, trigger.switch == "off")
    except OSError as error:
        interrupts.pass_on(error)
        became.reason = f"{run.control}: {error.strerror}"
    requests.note(run, name, trigger, became)
