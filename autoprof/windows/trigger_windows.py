"""Open trigger requests of the process that counts the steps."""

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
    """The requests that this process has taken and that are not over.

    Attributes:
        off: Whether autoprof was switched off in the run when somebody last looked.
    """

    def __init__(self) -> None:
        self.off = False
        self._open: list[_Window] = []
        self._folder = Folder()
        self._bell = Bell()
        self._read: set[str] = set()

    def look(self, run: RunDir, executed: int, take_it: bool = True) -> None:
        """Take what was asked for since the last look. `executed` counts the steps before the one that is `+1`.

        Without `take_it` another process takes it, and this one, a further rank of the same trainer, reads it as well.
        """
        changed = self._folder.look(run)
        if changed:
            self.off = layout.OFF in self._folder.names
        if not take_it:
            for name, trigger, begun in requests.read_along(run, self._folder.names, self._read) if changed else ():
                if not trigger.switch:
                    self._add(_Window(None, name, trigger, executed, begun))
            return
        asked = self._bell.take(run)
        if changed:
            asked += requests.take(run, self._folder.names)
        for name, trigger in asked:
            if trigger.switch:
                _switch(run, name, trigger)
                self.off = layout.switched_off(run)
            else:
                self._add(_Window(run, name, trigger, executed))

    def match(self, step: int, ordinal: int, against: str = "", for_good: bool = False) -> dict[str, Any] | None:
        """Return the settings with which a request captures `step`, or None where none does.

        `step` is the `ordinal`-th of the run. Of several windows the one that was asked for last decides; those that
        are counted in steps go on after it. `against` says why it is not captured whoever asked, and `for_good` that
        none after it is.
        """
        wanting = []
        for window in self._open:
            window.before(step)
            if window.wants(step, ordinal):
                wanting.append(window)
        for window in wanting:
            if not against and (window is wanting[-1] or window.steps is not None):
                window.begin(step)
        for window in self._open:
            window.passed(step, ordinal, against, for_good)
        self._keep()
        return wanting[-1].overrides if wanting and not against else None

    def foresee(self, step: int, ordinal: int) -> dict[str, Any] | None:
        """Return what `match` will return for a step to come, by the requests so far."""
        found = None
        for window in self._open:
            if window.wants(step, ordinal):
                found = window.overrides
        return found

    def ended(self) -> None:
        """End the step that was going on, with its captures."""
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
        """Return whether a request is for a step after the one that is going on."""
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
    """One request.

    Attributes:
        steps: Those that were named; None where they are counted.
        to_come: Whether a step after this one may be one of it.
        became: What became of it until now.
    """

    def __init__(
        self, run: RunDir | None, name: str, trigger: Trigger, executed: int, begun: Sequence[int] = ()
    ) -> None:
        self.name = name
        self.trigger = trigger
        self.steps = Steps.parse(trigger.at) if trigger.at else None
        self.to_come = True
        self.became = Became()
        # Where another process says what becomes of it there is none.
        self._run = run
        self._executed = executed
        self._left = trigger.steps
        # Of another process that was faster.
        self._begun = begun
        self._noted: Became | None = None

    @property
    def overrides(self) -> dict[str, Any]:
        """Return the settings of its captures, and why they are made."""
        return self.trigger.overrides | {values.REASON: self.trigger.reason or REASON}

    def before(self, step: int) -> None:
        """Begin `step`. Steps that another process began before it are not made up for."""
        if self.became.going_on != step:
            self.end()
        self._left -= sum(number < step for number in self._begun)
        self._begun = ()

    def wants(self, step: int, ordinal: int) -> bool:
        """Return whether it captures `step`, if that is not being captured already."""
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
        """Note that `step` has begun, captured or not. What speaks `against` any capture may do so `for_good`."""
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
        """Capture no further step."""
        self.to_come = False
        self.became.reason = reason
        self._close()

    def end(self) -> None:
        """End the step that was captured."""
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
        """Write down its state, if it has changed."""
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
