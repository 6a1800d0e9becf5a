"""Choice of the steps to capture, in the process that counts them.

`AUTOPROF_STEPS`, the conditions of `AUTOPROF_WHEN` and trigger requests choose up to `AUTOPROF_MAX_STEPS` steps. While
autoprof is switched off in the run, they choose none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from autoprof.base import log, seam
from autoprof.config.selection import Steps
from autoprof.config.settings import Settings
from autoprof.run import runtime
from autoprof.run.runtime import Runtime
from autoprof.rundir.layout import RunDir
from autoprof.windows.trigger_windows import OpenTriggers

if TYPE_CHECKING:
    from autoprof.windows.monitor import Monitor

_Result = TypeVar("_Result")


class Chooser:
    """Choice of one trainer's steps, or of one engine's batches.

    Attributes:
        off: True if autoprof was switched off in the run at the last look.
    """

    def __init__(self, of_trainer: bool = False) -> None:
        self.off = False
        self._triggers = OpenTriggers(of_trainer)
        self._captured: set[int] = set()
        self._monitor: Monitor | None = None

    def look(self, run: RunDir, step: int, take_it: bool = True) -> None:
        """Take the requests since the last look, as `trigger_windows.OpenTriggers.look` does."""
        self._triggers.look(run, step, take_it)
        if self._triggers.off != self.off:
            self.off = not self.off
            switched = "off" if self.off else "on again"
            log.warning(f"autoprof is switched {switched} in this run, by a file in {run.control}")

    def step_began(self, run: Runtime, step: int, ordinal: int) -> None:
        """Note that a step has begun. It is monitored if a setting compares steps."""
        if run.timeline.listener is None:
            self._monitor = None  # in a forked child, the monitor belongs to the parent
        elif self._monitor is None:
            from autoprof.windows import stats
            from autoprof.windows.monitor import Monitor

            self._monitor = Monitor(run, stats.attach(run))
        self._compare(lambda monitor: monitor.begins(step, ordinal))

    def step_ended(self, step: int, ordinal: int) -> None:
        """Note that the step has ended and that its span was written."""
        self._compare(lambda monitor: monitor.ended(step, ordinal, captured=step in self._captured))

    def choose(self, settings: Settings, step: int, ordinal: int) -> dict[str, Any] | None:
        """Return the settings with which `step` is captured, or None if it is not captured.

        `step` is the `ordinal`-th step, from 1, that the run executes.
        """
        overrides = self.asked(settings, step)
        if overrides is not None or self.off:
            return overrides
        due = self._monitor.due(ordinal) if self._monitor is not None else None
        if due is None and not Steps.parse(settings.steps).match(step, ordinal):
            return None
        if full := self._full(settings, step):
            log.warning_once(full)
            return None
        self._captured.add(step)
        return due or {}

    def asked(self, settings: Settings, step: int) -> dict[str, Any] | None:
        """Return the same as `choose`, but only by trigger requests."""
        if self.off:
            return self._triggers.match(step, "autoprof is switched off in this run")
        full = self._full(settings, step)
        if full and self._triggers.foresee(step) is not None:
            log.warning_once(full)
        overrides = self._triggers.match(step, full, for_good=bool(full))
        if overrides is not None:
            self._captured.add(step)
        return overrides

    def ended(self) -> None:
        """Note that the captured step and its captures in this process have ended."""
        self._triggers.ended()

    def with_stragglers(self, overrides: dict[str, Any], first: Callable[[], Mapping[int, int]]) -> dict[str, Any]:
        """Return the settings with the currently slowest ranks, as `Monitor.with_stragglers` does."""
        return self._compare(lambda monitor: monitor.with_stragglers(overrides, first)) or overrides

    def _compare(self, work: Callable[[Monitor], _Result]) -> _Result | None:
        """Return the result of `work` with the monitor, or None. An error is reported: the step must continue."""
        if self._monitor is not None:
            with seam.guard("comparing", runtime.report):
                return work(self._monitor)
        return None

    def close(self, reason: str) -> None:
        """Close all trigger requests."""
        self._triggers.close(reason)

    def any_after(self, settings: Settings, step: int, ordinal: int) -> bool:
        """Return True if a step after this one may be captured, by the current settings and requests."""
        if len(self._captured) >= settings.max_steps:
            return False
        if self._triggers.any_to_come or (self._monitor is not None and self._monitor.any_left(ordinal)):
            return True
        return Steps.parse(settings.steps).any_after(step, ordinal)

    def likely(self, settings: Settings, step: int, ordinal: int) -> bool:
        """Return True if `step` will be captured, by the current settings and requests."""
        if self.off or len(self._captured) >= settings.max_steps:
            return False
        if self._monitor is not None and self._monitor.foresee(ordinal) is not None:
            return True
        return self._triggers.foresee(step) is not None or Steps.parse(settings.steps).match(step, ordinal)

    def _full(self, settings: Settings, step: int) -> str:
        """Return the reason why `step` can't be captured, if the maximum number of steps is reached; else ""."""
        if step in self._captured or len(self._captured) < settings.max_steps:
            return ""
        return f"AUTOPROF_MAX_STEPS: {len(self._captured)} steps were captured, and no more will be"
