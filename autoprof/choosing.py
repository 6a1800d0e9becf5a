"""Which steps are captured, as whoever counts them decides: by `AUTOPROF_STEPS`, by the conditions of `AUTOPROF_WHEN`,
and by what was asked for while the run was going on; up to `AUTOPROF_MAX_STEPS` of them, and none while autoprof is
switched off in the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from autoprof import interrupts, log, runtime
from autoprof.asked import Windows
from autoprof.rundir import RunDir
from autoprof.runtime import Runtime
from autoprof.settings import Settings
from autoprof.window import Steps

if TYPE_CHECKING:
    from autoprof.comparing import Watch


class Chooser:
    """The choice of one trainer's steps, or of one engine's batches.

    Attributes:
        off: Whether autoprof was switched off in the run when somebody last looked.
    """

    def __init__(self) -> None:
        self.off = False
        self._asked = Windows()
        self._captured: set[int] = set()
        self._watch: Watch | None = None

    def look(self, run: RunDir, executed: int, take_it: bool = True) -> None:
        """See what was asked for since the last look, as in `asked.Windows.look`."""
        self._asked.look(run, executed, take_it)
        if self._asked.off != self.off:
            self.off = not self.off
            switched = "off" if self.off else "on again"
            log.warning(f"autoprof is switched {switched} in this run, by a file in {run.control}")

    def watch(self, run: Runtime, step: int, ordinal: int) -> None:
        """A step begins, which is watched where a setting compares it with others."""
        if run.teller is None:
            return
        try:
            if self._watch is None:
                from autoprof.comparing import Watch

                self._watch = Watch(run, run.teller)
            self._watch.begins(step, ordinal)
        except Exception as error:  # whoever works on the step must hear of it all the same
            interrupts.pass_on(error)
            runtime.report("comparing", error)

    def judge(self, step: int, ordinal: int) -> None:
        """The step has ended, and its span was written."""
        try:
            if self._watch is not None:
                self._watch.ended(step, ordinal, captured=step in self._captured)
        except Exception as error:
            interrupts.pass_on(error)
            runtime.report("comparing", error)

    def choose(self, settings: Settings, step: int, ordinal: int) -> dict[str, Any] | None:
        """The settings of its own that `step` is captured with, or None where it is not captured.

        `step` is the `ordinal`-th that the run executes.
        """
        overrides = self.asked(settings, step, ordinal)
        if overrides is not None or self.off:
            return overrides
        due = self._watch.due(ordinal) if self._watch is not None else None
        if due is None and not Steps.parse(settings.steps).match(step, ordinal):
            return None
        if full := self._full(settings, step):
            log.warning_once(full)
            return None
        self._captured.add(step)
        return due or {}

    def asked(self, settings: Settings, step: int, ordinal: int) -> dict[str, Any] | None:
        """The same, where it was asked for while the run was going on."""
        if self.off:
            return self._asked.match(step, ordinal, "autoprof is switched off in this run")
        full = self._full(settings, step)
        if full and self._asked.foresee(step, ordinal) is not None:
            log.warning_once(full)
        overrides = self._asked.match(step, ordinal, full, for_good=bool(full))
        if overrides is not None:
            self._captured.add(step)
        return overrides

    def ended(self) -> None:
        """The step that was captured is through, and so is what was recorded of it in this process."""
        self._asked.ended()

    def found(self, overrides: dict[str, Any], first: Callable[[], Mapping[int, int]]) -> dict[str, Any]:
        """The settings with the ranks that are the slowest now, as in `Watch.found`."""
        try:
            return overrides if self._watch is None else self._watch.found(overrides, first)
        except Exception as error:
            interrupts.pass_on(error)
            runtime.report("comparing", error)
            return overrides

    def close(self, reason: str) -> None:
        """Nothing comes of what was asked for while the run was going on."""
        self._asked.close(reason)

    def any_after(self, settings: Settings, step: int, ordinal: int) -> bool:
        """Whether a step after this one could be captured, by what is known now."""
        if len(self._captured) >= settings.max_steps:
            return False
        if self._asked.any_to_come or (self._watch is not None and self._watch.any_left(ordinal)):
            return True
        return Steps.parse(settings.steps).any_after(step, ordinal)

    def likely(self, settings: Settings, step: int, ordinal: int) -> bool:
        """Whether `step` will be captured, by what is known now."""
        if self.off or len(self._captured) >= settings.max_steps:
            return False
        if self._watch is not None and self._watch.foresee(ordinal) is not None:
            return True
        return self._asked.foresee(step, ordinal) is not None or Steps.parse(settings.steps).match(step, ordinal)

    def _full(self, settings: Settings, step: int) -> str:
        """What speaks against one more step, if `step` would be one."""
        if step in self._captured or len(self._captured) < settings.max_steps:
            return ""
        return f"no more steps are captured: {len(self._captured)} were, the most that AUTOPROF_MAX_STEPS allows"
