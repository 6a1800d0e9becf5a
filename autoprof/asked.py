"""The windows that were asked for while the run was going on, as whoever counts its steps keeps them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from autoprof import control, interrupts, log, settings
from autoprof.control import Became, Trigger
from autoprof.listening import Bell, Folder
from autoprof.rundir import RunDir
from autoprof.window import Steps

REASON = "autoprof trigger"


class Windows:
    """The triggers that this process has taken and that have not passed yet.

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
            self.off = control.OFF in self._folder.names
        if not take_it:
            for name, trigger, begun in control.read_along(run, self._folder.names, self._read) if changed else ():
                if not trigger.switch:
                    self._add(_Window(None, name, trigger, executed, begun))
            return
        asked = self._bell.take(run)
        if changed:
            asked += control.take(run, self._folder.names)
        for name, trigger in asked:
            if trigger.switch:
                _switch(run, name, trigger)
                self.off = control.switched_off(run)
            else:
                self._add(_Window(run, name, trigger, executed))

    def match(self, step: int, ordinal: int, against: str = "", for_good: bool = False) -> dict[str, Any] | None:
        """The settings of its own that `step` is captured with, or None where nobody asked for it.

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
        """What `match` will return for a step that is still to come, by what was asked for until now."""
        found = None
        for window in self._open:
            if window.wants(step, ordinal):
                found = window.overrides
        return found

    def ended(self) -> None:
        """The step that was going on is through, with what was recorded of it."""
        for window in self._open:
            window.end()
        self._keep()

    def close(self, reason: str) -> None:
        """Nothing comes of what was asked for until now."""
        for window in self._open:
            window.close(reason)
        self._keep()

    @property
    def any_to_come(self) -> bool:
        """Whether a step after the one that is going on was asked for."""
        return any(window.to_come for window in self._open)

    def _keep(self) -> None:
        for window in self._open:
            window.note()
        self._open = [window for window in self._open if not window.became.over]

    def _add(self, window: _Window) -> None:
        for other in self._open:
            if other.trigger == window.trigger:
                log.info(f"the request {window.name} is the same as {other.name}, which is open: they are one")
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
        """The settings that its steps are captured with, and why."""
        return self.trigger.overrides | {settings.REASON: self.trigger.reason or REASON}

    def before(self, step: int) -> None:
        """`step` begins. What another process had begun before it is not made up for."""
        if self.became.going_on != step:
            self.end()
        self._left -= sum(number < step for number in self._begun)
        self._begun = ()

    def wants(self, step: int, ordinal: int) -> bool:
        """Whether `step` is to be captured for it, if it is not being captured already."""
        if self.became.going_on == step:
            return False
        if self.steps is not None:
            return self.steps.match(step, ordinal - self._executed)
        return self._left > 0 and step >= (self.trigger.since or 0)

    def begin(self, step: int) -> None:
        """`step` is captured."""
        self._left -= 1
        self.became.state = "open"
        self.became.going_on = step

    def passed(self, step: int, ordinal: int, against: str, for_good: bool) -> None:
        """`step` has begun, and this window has it or not. What speaks `against` capturing any may do so `for_good`."""
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
        """No further step is captured."""
        self.to_come = False
        self.became.reason = reason
        self._close()

    def end(self) -> None:
        """The step that was captured is through."""
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
        """Say what has become of it, if that is something new."""
        if self._run is not None and self.became != self._noted:
            control.note(self._run, self.name, self.trigger, self.became)
            self._noted = copy.deepcopy(self.became)


def _switch(run: RunDir, name: str, trigger: Trigger) -> None:
    became = Became(state="done")
    try:
        control.switch(run, trigger.switch == "off")
    except OSError as error:
        interrupts.pass_on(error)
        became.reason = f"{run.control}: {error.strerror}"
    control.note(run, name, trigger, became)
