"""Requests of `autoprof trigger`: files in a run's `control/` folder, taken when a step begins. Nobody polls."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

import msgspec

from autoprof import _files, log, settings
from autoprof.rundir import RunDir, write_json
from autoprof.window import STEPS_TAKE, Steps

# What is taken, and what could not be read, stays there under these endings.
TAKEN = ".taken"
REFUSED = ".refused"
ENDING = ".json"
# While this is there, autoprof does nothing in the run.
OFF = "off"
_MOST_BYTES = 64 << 10


class Trigger(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A window that somebody asked for while the run was going on.

    Attributes:
        steps: As in `AUTOPROF_STEPS`; `+1` is the step that begins next.
        overrides: Settings of that window: those of `settings.WINDOW_FIELDS`.
        reason: Why it was asked for.
    """

    steps: str = "+1"
    overrides: dict[str, Any] = {}
    reason: str = ""


class Windows:
    """The triggers that this process has taken and that have not passed yet."""

    def __init__(self) -> None:
        self._open: list[_Window] = []
        self._read: set[str] = set()

    def look(self, run: RunDir, executed: int, take_it: bool = True) -> None:
        """Take what was asked for since the last look. `executed` counts the steps before the one that is `+1`.

        Without `take_it` another process takes it, and this one, a further rank of the same trainer, reads it as well.
        """
        asked = take(run) if take_it else _read_along(run, self._read)
        self._open += [_Window(trigger, executed) for trigger in asked]

    def match(self, step: int, ordinal: int) -> dict[str, Any] | None:
        """The settings of its own that `step` is captured with, or None where nobody asked for it.

        `step` is the `ordinal`-th of the run. Of several windows the one that was asked for last decides.
        """
        found = self.foresee(step, ordinal)
        self._open = [each for each in self._open if each.steps.any_after(step, ordinal - each.executed)]
        return found

    def foresee(self, step: int, ordinal: int) -> dict[str, Any] | None:
        """What `match` will return for a step that is still to come, by what was asked for until now."""
        found = None
        for window in self._open:
            if window.steps.match(step, ordinal - window.executed):
                found = window.overrides | {settings.REASON: window.reason or "autoprof trigger"}
        return found

    def __len__(self) -> int:
        return len(self._open)


class _Window:
    def __init__(self, trigger: Trigger, executed: int) -> None:
        self.steps = Steps.parse(trigger.steps)
        self.executed = executed
        self.overrides = trigger.overrides
        self.reason = trigger.reason


def ask(run: RunDir, trigger: Trigger) -> Path:
    """Leave a request for the run's trainer.

    Raises:
        OSError: It can't be written.
    """
    _files.open_as(run.path)
    name = f"{time.time_ns() // 1_000_000}-{os.getpid()}-{os.urandom(2).hex()}{ENDING}"
    path = run.control / name
    write_json(path, msgspec.to_builtins(trigger))
    return path


def take(run: RunDir) -> list[Trigger]:
    """The requests that nobody has taken, oldest first. Each is taken once, whoever looks. Raises nothing."""
    try:
        names = sorted(name for name in os.listdir(run.control) if name.endswith(ENDING))
    except OSError:  # nobody has asked for anything
        return []
    taken = []
    for name in names:
        path = run.control / name
        try:
            os.replace(path, f"{path}{TAKEN}")
        except FileNotFoundError:  # somebody else was faster
            continue
        except OSError as error:
            log.warning_once(f"{path}: it can't be taken: {error.strerror}; the folder must be this user's")
            continue
        try:
            taken.append(_read(run, Path(f"{path}{TAKEN}")))
        except (OSError, ValueError, RecursionError, msgspec.MsgspecError) as error:
            with contextlib.suppress(OSError):
                os.replace(f"{path}{TAKEN}", f"{path}{REFUSED}")
            log.warning(f"{path} is refused: {error}")
    return taken


def _read_along(run: RunDir, known: set[str]) -> list[Trigger]:
    """The requests that are there, taken or not, less those in `known`, which they are added to."""
    try:
        names = sorted({name.removesuffix(TAKEN) for name in os.listdir(run.control)})
    except OSError:  # nobody has asked for anything
        return []
    found = []
    for name in names:
        if name in known or not name.endswith(ENDING):
            continue
        known.add(name)
        for path in (run.control / name, Path(f"{run.control / name}{TAKEN}")):
            try:
                found.append(_read(run, path))
                break
            except FileNotFoundError:  # it has been taken just now
                continue
            except (OSError, ValueError, RecursionError, msgspec.MsgspecError):  # whoever takes it says so
                break
    return found


def switched_off(run: RunDir) -> bool:
    """Whether autoprof is switched off in the run."""
    return os.path.lexists(run.control / OFF)


def switch(run: RunDir, off: bool) -> None:
    """Switch autoprof off in a run that is going on, or on again.

    Raises:
        OSError: The folder can't be written.
    """
    if off:
        write_json(run.control / OFF, {"off": True})
    else:
        (run.control / OFF).unlink(missing_ok=True)


def waiting(run: RunDir) -> list[str]:
    """The names of the requests that nobody has taken."""
    return sorted(path.name for path in run.control.glob(f"*{ENDING}"))


def refused(run: RunDir) -> list[str]:
    """The names of the requests that could not be read."""
    return sorted(path.name.removesuffix(REFUSED) for path in run.control.glob(f"*{REFUSED}"))


def _read(run: RunDir, path: Path) -> Trigger:
    # The run's directory says who it belongs to, where a disk has other owners for root.
    owners = {0, os.geteuid(), run.path.stat().st_uid}
    trigger = msgspec.json.decode(_files.read(path, _MOST_BYTES, owners), type=Trigger)
    return msgspec.structs.replace(checked(trigger.steps, trigger.overrides), reason=trigger.reason)


def checked(steps: str, overrides: dict[str, Any]) -> Trigger:
    """A trigger whose values are right.

    Raises:
        SettingsError: One is wrong.
    """
    if not steps.strip():
        raise settings.SettingsError(f"steps: got {steps!r}; it takes {STEPS_TAKE}, and mixtures")
    return Trigger(steps=settings.steps(steps), overrides=settings.overrides(overrides))
