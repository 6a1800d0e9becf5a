"""Choice of the steps to capture, in the process that counts the steps.

`AUTOPROF_STEPS`, the conditions of `AUTOPROF_WHEN` and trigger requests choose up to `AUTOPROF_MAX_STEPS` steps. While
autoprof is switched off in the run, no step is chosen.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from autoprof.base import files, identity, log, seam
from autoprof.base.originals import os, time
from autoprof.config import values
from autoprof.config.selection import Steps
from autoprof.config.settings import Settings
from autoprof.run import cluster, runtime
from autoprof.run.runtime import Runtime
from autoprof.rundir import layout
from autoprof.rundir.layout import RunDir
from autoprof.windows import requests
from autoprof.windows.requests import Became, Trigger

if TYPE_CHECKING:
    from autoprof.windows.monitor import Monitor

_Result = TypeVar("_Result")


# Reason of a window that a user requests.
_REASON = "autoprof trigger"


class OpenTriggers:
    """The trigger requests that are not over, in the process that counts the steps.

    Args:
        of_trainer: True if a trainer counts the steps. All ranks of the trainer, and later attempts at the run, share
            the requests. False for the batches of an engine.

    Attributes:
        off: True if autoprof was switched off in the run when `look` was last called.
    """

    def __init__(self, of_trainer: bool = False) -> None:
        self.off = False
        self._of_trainer = of_trainer
        self._open: list[_Window] = []
        self._known: set[str] = set()
        self._looked = self._registered = False

    def look(self, run: RunDir, step: int, take_it: bool = True) -> None:
        """Take new requests, and continue the requests of an earlier attempt at the run.

        If a launcher has started several trainer processes, the windows of new requests begin after `step`, because
        another trainer process may have begun `step` already.

        Args:
            run: The directory of the run, where the requests are.
            step: The step that begins now, or the next step if no step begins now.
            take_it: True to take new requests. False in all ranks of a trainer except rank 0: they only read the
                requests that rank 0 has taken.
        """
        if not self._looked and files.is_folder(run.path):
            # Make the folder before anyone sends a request. Otherwise, an NFS client may remember for up to a minute
            # that the folder does not exist.
            with seam.suppress(OSError):
                files.folder(run.control)
        names = requests.names(run)
        if (layout.OFF in names) != self.off:
            self.off = not self.off
            switched = "off" if self.off else "on again"
            log.warning(f"autoprof is switched {switched} in this run, by a file in {run.control}")
        if self._of_trainer and not (take_it and self._looked):
            for name, trigger, became in requests.taken(run, names, self._known):
                if not (take_it and requests.is_held(became)):
                    self._open.append(_Window(run if take_it else None, name, trigger, became, step))
        self._looked = True
        if not take_it:
            return
        if not self._registered and cluster.is_up():
            self._registered = True
            with seam.guard("autoprof trigger --ray can't find this run", log.error_once):
                _register(run)
        first_step = step + 1 if self._of_trainer and identity.ranks() > 1 else step
        for name, trigger in requests.take(run, names):
            became = Became(first=first_step, slowest=self.slowest(trigger))
            self._open.append(_Window(run, name, trigger, became, step))

    def slowest(self, trigger: Trigger) -> dict[str, tuple[str, str]]:
        """Return the slowest ranks for a request, which the other ranks of a launcher do not know."""
        return {}

    def match(self, step: int, against: str = "", for_good: bool = False) -> dict[str, Any] | None:
        """Return the overrides with which a request captures `step`, or None if no request captures `step`.

        If windows overlap, the overrides of the newest window are used. An older window that asks for a number of steps
        does not count `step`, so the older window continues after the newest window has ended. If both requests are
        equal, `step` counts for both windows.

        Args:
            step: The global step.
            against: Reason why `step` can't be captured, even if a request asks for it. Empty if `step` can be
                captured.
            for_good: True if the reason in `against` also prevents the capture of all later steps.
        """
        for window in self._open:
            if window.became.going_on != step:  # the capture of an earlier step has ended
                window.end()
        matching = [window for window in self._open if window.wants(step)]
        for window in matching:
            if not against and (window.trigger == matching[-1].trigger or window.steps is not None):
                window.begin(step)
        for window in self._open:
            window.passed(step, against, for_good)
        self._update_windows()
        return matching[-1].overrides if matching and not against else None

    def foresee(self, step: int) -> dict[str, Any] | None:
        """Return the overrides that `match` would return for `step`. The states of the requests do not change."""
        return next((window.overrides for window in reversed(self._open) if window.wants(step)), None)

    def ended(self) -> None:
        """Note that the current step and its captures have ended."""
        for window in self._open:
            window.end()
        self._update_windows()

    def begin_anew(self) -> None:
        """Let all requests continue with the steps of a new loop, whose numbers may be lower."""
        for window in self._open:
            window.end()
            window.begin_anew()

    def close(self, reason: str) -> None:
        """Close all requests. `reason` becomes a part of their states."""
        for window in self._open:
            window.close(reason)
        self._update_windows()

    @property
    def any_to_come(self) -> bool:
        """True if a request asks for a step after the current one."""
        return any(window.to_come for window in self._open)

    def _update_windows(self) -> None:
        """Write the changed states of the requests. Forget the requests that are over."""
        for window in self._open:
            window.note()
        self._open = [window for window in self._open if not window.became.over]


def _register(run: RunDir) -> None:
    """Let `autoprof trigger --ray` find this process: write into Ray's key-value store that it takes the requests."""
    import ray

    current = runtime.current()
    entry = requests.Registered(
        id=run.path.name,
        directory=str(run.path),
        host=identity.HOST,
        node=ray.get_runtime_context().get_node_id(),
        pid=os.getpid(),
        ticks=identity.start_ticks(os.getpid()) or 0,
        started=current.info.started if current is not None else time.time(),
        uid=current.info.uid if current is not None else os.geteuid(),
    )
    cluster.put(requests.registered(run.path.name), msgspec.json.encode(entry))


class _Window:
    """The window that one trigger request asks for, and the state of the request.

    Attributes:
        steps: The steps of `Trigger.at`; None if the request asks for a number of steps.
        to_come: True if a later step may belong to the window.
        became: The state of the request.
    """

    def __init__(self, run: RunDir | None, name: str, trigger: Trigger, became: Became, step: int) -> None:
        begun_steps = [n for n in (*became.captured, became.going_on) if n is not None and n < step]
        self.name = name
        self.trigger = trigger
        self.steps = Steps.parse(trigger.at) if trigger.at else None
        self.to_come = True
        self.became = Became(
            state="open" if begun_steps else "taken",
            first=became.first,
            captured=begun_steps,
            slowest=became.slowest,
        )
        # None if another process writes the state of the request.
        self._run = run
        self._first = became.first or 0
        # Number of steps still to capture.
        self._left = trigger.steps - len(begun_steps)
        self._noted: Became | None = None

    @property
    def overrides(self) -> dict[str, Any]:
        """The overrides for the captures of the window, including the reason for the window."""
        slowest = {values.FOUND: self.became.slowest} if self.became.slowest else {}
        return self.trigger.overrides | {values.REASON: self.trigger.reason or _REASON} | slowest

    def wants(self, step: int) -> bool:
        """Return True if `step` belongs to the window and is not being captured already."""
        if self.became.going_on == step or step < self._first:
            return False
        if self.steps is not None:
            return self.steps.matches(step, step - self._first + 1)
        return self._left > 0 and step >= (self.trigger.since or 0)

    def begin_anew(self) -> None:
        """Accept the first steps of a new loop."""
        self._first = min(self._first, 1)

    def begin(self, step: int) -> None:
        """Note that the capture of `step` begins. The step counts as captured."""
        self._left -= 1
        self.became.state = "open"
        self.became.going_on = step

    def passed(self, step: int, against: str, for_good: bool) -> None:
        """Note that `step` has begun, with or without a capture.

        Args:
            step: The global step.
            against: Reason why `step` can't be captured. Empty if `step` can be captured.
            for_good: True if the reason in `against` also prevents the capture of all later steps.
        """
        if self.steps is not None:
            if against and self.wants(step):
                self.became.reason = f"step {step}: {against}"
            self.to_come = self.steps.any_after(step, step - self._first + 1)
        else:
            self.to_come = self._left > 0
        if self.to_come and for_good:
            self.close(against)
        self._close_if_ended()

    def close(self, reason: str) -> None:
        """Close the window: capture no further steps. `reason` becomes a part of the state."""
        self.to_come = False
        self.became.reason = reason
        self._close_if_ended()

    def end(self) -> None:
        """If a step is being captured, note that its capture has ended."""
        if self.became.going_on is not None:
            self.became.captured.append(self.became.going_on)
            self.became.going_on = None
            self._close_if_ended()

    def _close_if_ended(self) -> None:
        """Close the request if no step is being captured and no later step can belong to the window."""
        if self.to_come or self.became.going_on is not None:
            return
        self.became.state = "done"
        if not self.became.captured and not self.became.reason:
            self.became.reason = "its steps had passed when it was taken"

    def note(self) -> None:
        """Write the state of the request if the state has changed."""
        if self._run is not None and self.became != self._noted:
            requests.note(self._run, self.name, self.trigger, self.became)
            self._noted = copy.deepcopy(self.became)


class Chooser(OpenTriggers):
    """Object that decides which steps of one trainer, or which batches of one engine, are captured."""

    def __init__(self, of_trainer: bool = False) -> None:
        super().__init__(of_trainer)
        self._captured: set[int] = set()
        # Number of the steps that were captured in earlier loops.
        self._captured_before = 0
        self._monitor: Monitor | None = None

    def loop_began(self) -> None:
        """Note that the next step begins a new loop. Its steps are not compared with the steps of the earlier loop."""
        self._captured_before += len(self._captured)
        self._captured = set()
        self._monitor = None
        self.begin_anew()

    @property
    def _captured_count(self) -> int:
        return self._captured_before + len(self._captured)

    def step_began(self, run: Runtime, step: int, step_in_run: int) -> None:
        """Note that a step has begun, for the comparison of steps. Do nothing if no setting compares steps."""
        if run.timeline.listener is None:
            self._monitor = None  # in a forked child, the monitor belongs to the parent
        elif self._monitor is None:
            from autoprof.windows import stats
            from autoprof.windows.monitor import Monitor

            self._monitor = Monitor(run, stats.attach(run))
        self._compare(lambda monitor: monitor.step_began(step, step_in_run))

    def step_ended(self, step: int, step_in_run: int) -> None:
        """Compare a step that has ended, if a setting compares steps. Its span must be written before this call."""
        self._compare(lambda monitor: monitor.step_ended(step, step_in_run, captured=step in self._captured))

    def choose(self, settings: Settings, step: int, step_in_run: int) -> dict[str, Any] | None:
        """Return the overrides with which `step` is captured, or None if `step` is not captured.

        Overrides are values that replace settings of the run. They are empty if `AUTOPROF_STEPS` has chosen the step.

        Args:
            settings: The settings of the run.
            step: The global step.
            step_in_run: Number of the step in this run, from 1. In a resumed run, it is lower than the global step.
        """
        overrides = self.asked(settings, step)
        if overrides is not None or self.off:
            return overrides
        due_overrides = self._monitor.take_overrides(step_in_run) if self._monitor is not None else None
        if due_overrides is None and not Steps.parse(settings.steps).matches(step, step_in_run):
            return None
        if limit_reason := self._full(settings, step):
            log.warning_once(limit_reason)
            return None
        self._captured.add(step)
        return due_overrides or {}

    def asked(self, settings: Settings, step: int) -> dict[str, Any] | None:
        """Return the overrides for `step` as `choose` does, but consider only trigger requests."""
        if self.off:
            return self.match(step, "autoprof is switched off in this run")
        limit_reason = self._full(settings, step)
        if limit_reason and self.foresee(step) is not None:
            log.warning_once(limit_reason)
        overrides = self.match(step, limit_reason, for_good=bool(limit_reason))
        if overrides is not None:
            self._captured.add(step)
        return overrides

    def with_stragglers(self, overrides: dict[str, Any], first: Callable[[], Mapping[int, int]]) -> dict[str, Any]:
        """Return the overrides of a window, completed by the slowest ranks as `Monitor.with_stragglers` does."""
        return self._compare(lambda monitor: monitor.with_stragglers(overrides, first)) or overrides

    def slowest(self, trigger: Trigger) -> dict[str, tuple[str, str]]:
        """Return the slowest ranks for a request, which the other ranks of a launcher do not know."""
        ranks = self.with_stragglers(trigger.overrides, dict) if identity.ranks() > 1 else {}
        return dict(ranks.get(values.FOUND, {}))

    def _compare(self, work: Callable[[Monitor], _Result]) -> _Result | None:
        """Call `work` with the monitor and return the result. Return None if there is no monitor or if `work` fails.

        An error of `work` is only reported, because the step must continue.
        """
        if self._monitor is not None:
            with seam.guard("comparing", runtime.report):
                return work(self._monitor)
        return None

    def any_after(self, settings: Settings, step: int, step_in_run: int) -> bool:
        """Return True if the current settings and requests allow the capture of a step after `step`."""
        if self._captured_count >= settings.max_steps:
            return False
        if self.any_to_come or (self._monitor is not None and self._monitor.any_left(step_in_run)):
            return True
        return Steps.parse(settings.steps).any_after(step, step_in_run)

    def likely(self, settings: Settings, step: int, step_in_run: int) -> bool:
        """Return True if `step` will be captured unless settings or requests change."""
        if self.off or self._captured_count >= settings.max_steps:
            return False
        if self._monitor is not None and self._monitor.foresee(step_in_run) is not None:
            return True
        return self.foresee(step) is not None or Steps.parse(settings.steps).matches(step, step_in_run)

    def _full(self, settings: Settings, step: int) -> str:
        """Return the reason why `step` can't be captured if `AUTOPROF_MAX_STEPS` is reached, else an empty text."""
        if step in self._captured or self._captured_count < settings.max_steps:
            return ""
        return f"AUTOPROF_MAX_STEPS: {self._captured_count} steps were captured, and no more will be"
