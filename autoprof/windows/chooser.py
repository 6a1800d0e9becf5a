"""Choice of the steps to capture, in the process that counts them.

`AUTOPROF_STEPS`, the conditions of `AUTOPROF_WHEN` and trigger requests choose up to `AUTOPROF_MAX_STEPS` steps. While
autoprof is switched off in the run, they choose none.
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
        """Take the requests since the last look, as `OpenTriggers.look` does."""
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


# Reason of a window that a user requests.
_REASON = "autoprof trigger"


class OpenTriggers:
    """Requests that are not over, in the process that counts the steps.

    Args:
        of_trainer: True if the steps are a trainer's, whose ranks and attempts share the requests; False for batches.

    Attributes:
        off: True if autoprof was switched off in the run at the last look.
    """

    def __init__(self, of_trainer: bool = False) -> None:
        self.off = False
        self._of_trainer = of_trainer
        self._open: list[_Window] = []
        self._known: set[str] = set()
        self._looked = self._registered = False

    def look(self, run: RunDir, step: int, take_it: bool = True) -> None:
        """Take new requests, and continue the requests of an earlier attempt at the run.

        If a launcher has started several trainers, their windows begin after `step`: the others may have begun it.

        Args:
            run: The run.
            step: The step that begins now, or begins next.
            take_it: False in a further rank of the same trainer. It reads the requests that rank 0 has taken.
        """
        if not self._looked:
            _make_folder(run)
        names = requests.names(run)
        self.off = layout.OFF in names
        if self._of_trainer and not (take_it and self._looked):
            for name, trigger, became in requests.taken(run, names, self._known):
                if not (take_it and requests.is_held(became)):
                    self._open.append(_Window(run if take_it else None, name, trigger, became, step))
        self._looked = True
        if not take_it:
            return
        self._register(run)
        first = step + 1 if self._of_trainer and identity.ranks() > 1 else step
        for name, trigger in requests.take(run, names):
            self._open.append(_Window(run, name, trigger, Became(first=first), step))

    def match(self, step: int, against: str = "", for_good: bool = False) -> dict[str, Any] | None:
        """Return the settings with which a request captures `step`, or None if no request does.

        If windows overlap, the newest decides. An older window that asks for a number of steps is continued after it,
        unless both requests are equal.

        Args:
            step: The global step.
            against: Reason why the step is not captured, even if a request asks for it; empty for none.
            for_good: True if, for this reason, no later step is captured either.
        """
        for window in self._open:
            window.before(step)
        matching = [window for window in self._open if window.wants(step)]
        for window in matching:
            if not against and (window.trigger == matching[-1].trigger or window.steps is not None):
                window.begin(step)
        for window in self._open:
            window.passed(step, against, for_good)
        self._keep()
        return matching[-1].overrides if matching and not against else None

    def foresee(self, step: int) -> dict[str, Any] | None:
        """Return the settings that `match` would return for a step, by the current requests."""
        overrides = None
        for window in self._open:
            if window.wants(step):
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

    def _register(self, run: RunDir) -> None:
        """Let `autoprof trigger --ray` find this process, once it is connected to Ray. Errors are logged."""
        if self._registered or not cluster.is_up():
            return
        self._registered = True
        with seam.guard("autoprof trigger --ray can't find this run", log.error_once):
            _register(run)


def _register(run: RunDir) -> None:
    """Write into Ray's key-value store that this process takes the requests of this run."""
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
    """Window of one request.

    Attributes:
        steps: The steps of `Trigger.at`; None if the request asks for a number of steps.
        to_come: True if a later step may belong to it.
        became: Its state.
    """

    def __init__(self, run: RunDir | None, name: str, trigger: Trigger, became: Became, step: int) -> None:
        begun = [number for number in (*became.captured, became.going_on) if number is not None and number < step]
        self.name = name
        self.trigger = trigger
        self.steps = Steps.parse(trigger.at) if trigger.at else None
        self.to_come = True
        self.became = Became(state="open" if begun else "taken", first=became.first, captured=begun)
        # None if another process writes the state of the request.
        self._run = run
        self._first = became.first or 0
        # Number of steps still to capture.
        self._left = trigger.steps - len(begun)
        self._noted: Became | None = None

    @property
    def overrides(self) -> dict[str, Any]:
        """Settings of its captures, with their reason."""
        return self.trigger.overrides | {values.REASON: self.trigger.reason or _REASON}

    def before(self, step: int) -> None:
        """Prepare for `step`. The capture of an earlier step has ended."""
        if self.became.going_on != step:
            self.end()

    def wants(self, step: int) -> bool:
        """Return True if `step` belongs to it, and is not already being captured."""
        if self.became.going_on == step or step < self._first:
            return False
        if self.steps is not None:
            return self.steps.match(step, step - self._first + 1)
        return self._left > 0 and step >= (self.trigger.since or 0)

    def begin(self, step: int) -> None:
        """Count `step` as captured."""
        self._left -= 1
        self.became.state = "open"
        self.became.going_on = step

    def passed(self, step: int, against: str, for_good: bool) -> None:
        """Note that `step` has begun, captured or not. `against` and `for_good`: as in `OpenTriggers.match`."""
        if self.steps is not None:
            if against and self.wants(step):
                self.became.reason = f"step {step}: {against}"
            self.to_come = self.steps.any_after(step, step - self._first + 1)
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


def _make_folder(run: RunDir) -> None:
    """Make `control/`, because an NFS client may remember for a minute that it did not exist."""
    if files.is_folder(run.path):
        with seam.suppress(OSError):
            files.folder(run.control)
