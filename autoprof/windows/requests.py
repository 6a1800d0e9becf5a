"""Requests of `autoprof trigger`: files in a run's `control/` folder, which is listed once per step.

A request is the file `<name>.json`. The process that takes the request renames the file to `<name>.json.taken`. It then
writes two things into the `.taken` file: the progress of the request, which `--wait` reads, and the step from which the
request counts, which the other ranks of the trainer read. A rejected request is kept as `<name>.json.refused`, and its
`.taken` file has the reason.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import msgspec

from autoprof.base import files, identity, log, seam
from autoprof.base.originals import os, time
from autoprof.base.redact import hidden
from autoprof.config import settings, values
from autoprof.config.selection import STEPS_TAKE, Steps
from autoprof.config.values import thread_safe
from autoprof.rundir import layout
from autoprof.rundir.layout import RunDir, write_json

TAKEN = ".taken"
REFUSED = ".refused"
ENDING = ".json"
MOST_BYTES = 64 << 10
_MAX_STEPS = 1_000_000
# Exceptions of reading and decoding a wrong request.
UNREADABLE = (OSError, ValueError, RecursionError)


@thread_safe
class Trigger(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"since": "from"}):
    """Request for a window during the run.

    Attributes:
        run: Id of the run.
        steps: Number of steps to capture.
        since: The first step to capture; None for the step that begins next.
        at: Steps as in `AUTOPROF_STEPS`, instead of `steps` and `since`. `+1` is the step that begins next.
        overrides: Settings of the window, by the names in `settings.WINDOW_FIELDS`.
        reason: Reason for a window that the run itself requests (`monitor.py`); empty for users' requests.
    """

    run: str = ""
    steps: int = 1
    since: int | None = None
    at: str = ""
    overrides: dict[str, Any] = {}
    reason: str = ""

    def __str__(self) -> str:
        if self.at:
            return f"steps {self.at}"
        if self.since is None:
            return "the next step" if self.steps == 1 else f"the next {self.steps} steps"
        return f"step {self.since}" if self.steps == 1 else f"{self.steps} steps from {self.since} on"


@thread_safe
class Became(msgspec.Struct, kw_only=True):
    """State of a request.

    Attributes:
        state: `taken`: no requested step has begun. `open`: a requested step has begun. `done`: no more steps will be
            captured. `refused`: the request is wrong.
        by: Host and pid of the process that took the request.
        first: The first step that can belong to the request, which is `+1` in `Trigger.at`.
        captured: Steps whose captures have ended.
        going_on: Step that is being captured, if any.
        reason: Reason why the request was refused, or why not all requested steps were captured.
        slowest: The slowest ranks for the other ranks of a launcher, as in `Settings.overridden`.
    """

    state: Literal["taken", "open", "done", "refused"] = "taken"
    by: str = ""
    first: int | None = None
    captured: list[int] = []
    going_on: int | None = None
    reason: str = ""
    slowest: dict[str, tuple[str, str]] = {}

    @property
    def over(self) -> bool:
        """True if the state will not change any more."""
        return self.state in ("done", "refused")


def checked(trigger: Trigger) -> Trigger:
    """Check a trigger. Return the trigger with its overrides in the form that `Settings.overridden` takes.

    Raises:
        SettingsError: A value is wrong.
    """
    if not 1 <= trigger.steps <= _MAX_STEPS:
        raise values.SettingsError(f"steps: got {trigger.steps}; it takes a number of steps from 1 to {_MAX_STEPS}")
    if trigger.since is not None and trigger.since < 0:
        raise values.SettingsError(f"from: got {trigger.since}; it takes a step number from 0")
    if trigger.at and (trigger.since is not None or trigger.steps != 1):
        raise values.SettingsError(f"at: got {trigger.at!r}; it replaces steps and from; give it alone")
    if trigger.at:
        settings.check("steps", trigger.at, "at")
        if not Steps.parse(trigger.at).any:
            raise values.SettingsError(f"at: got {trigger.at!r}; it takes {STEPS_TAKE}, or a mixture")
    return msgspec.structs.replace(trigger, overrides=settings.overrides(trigger.overrides))


def decoded(content: bytes, run_id: str) -> Trigger:
    """Decode and check the trigger of a request.

    Raises:
        ValueError: The content is wrong, or the request is for another run.
    """
    if len(content) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES} bytes")
    trigger = msgspec.json.decode(content, type=Trigger)
    if trigger.run != run_id:
        raise ValueError(f"it is for run {trigger.run[:80]!r}")
    return checked(trigger)


def new_name() -> str:
    """Return a unique name for a request. Names sort by time."""
    return f"{time.time_ns()}-{os.getpid()}-{os.urandom(4).hex()}{ENDING}"


def ask(run: RunDir, trigger: Trigger) -> Path:
    """Write a request for the run's trainer. Return the path of the request.

    Raises:
        OSError: The file can't be written.
    """
    files.open_as(run.path)
    path = run.control / new_name()
    write_json(path, msgspec.to_builtins(msgspec.structs.replace(trigger, run=run.path.name)))
    return path


def names(run: RunDir) -> list[str]:
    """Return the names of the files in `control/`, oldest requests first.

    An NFS client asks its server for changes when a folder is opened, but not at each `stat` (Linux, fs/nfs/dir.c,
    nfs_lookup_verify_inode). So this function opens the folder.
    """
    with seam.suppress(OSError):  # without requests there is no such folder
        folder = files.descriptor(run.control, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            return sorted(os.listdir(folder))
        finally:
            os.close(folder)
    return []


def take(run: RunDir, listing: Iterable[str]) -> list[tuple[str, Trigger]]:
    """Take the new requests and return their names and triggers, oldest first. Only one process takes a request.

    Errors are logged.

    Args:
        run: The directory of the run.
        listing: The names in `control/`.
    """
    taken_requests = []
    for name in listing:
        if not name.endswith(ENDING):
            continue
        path = f"{run.control / name}{TAKEN}"
        try:
            os.replace(run.control / name, path)
        except FileNotFoundError as error:  # another process has taken it
            seam.pass_on(error)
            continue
        except OSError as error:
            seam.pass_on(error)
            log.warning_once(
                f"{run.control / name}: can't take the request: {error.strerror}; the folder must belong to this user"
            )
            continue
        try:
            taken_requests.append((name, decoded(_content(run, path), run.path.name)))
        except UNREADABLE as error:
            seam.pass_on(error)
            with seam.suppress(OSError):
                os.replace(path, f"{run.control / name}{REFUSED}")
            refuse(run, name, error)
    return taken_requests


def refuse(run: RunDir, name: str, error: Exception) -> None:
    """Log why a request is refused, and write the reason into its `.taken` file. Errors are logged."""
    reason = _reason(error)
    log.warning(f"the request {run.control / name} is refused: {reason}")
    note(run, name, None, Became(state="refused", reason=reason))


def note(run: RunDir, name: str, trigger: Trigger | None, became: Became) -> None:
    """Write the state of a request into its `.taken` file. Errors are logged."""
    became.by = f"{identity.HOST}-{os.getpid()}"
    fields = {} if trigger is None else msgspec.to_builtins(trigger)
    try:
        write_json(Path(f"{run.control / name}{TAKEN}"), fields | {"became": msgspec.to_builtins(became)})
    except OSError as error:
        seam.pass_on(error)
        log.warning_once(f"{run.control}: outcomes of trigger requests can't be written there: {error.strerror}")


def taken(run: RunDir, listing: Iterable[str], known: set[str]) -> list[tuple[str, Trigger, Became]]:
    """Return the requests that another process has taken and that are not over, with their states.

    Args:
        run: The directory of the run.
        listing: The names in `control/`.
        known: Names to skip. This function adds the names of the requests that it has read.
    """
    requests = []
    for name in listing:
        if not name.endswith(f"{ENDING}{TAKEN}") or name in known:
            continue
        try:
            fields = msgspec.json.decode(_content(run, f"{run.control / name}"), type=dict[str, Any])
            if "became" not in fields:  # the process that takes it has yet to write its state
                continue
            became = msgspec.convert(fields.pop("became"), Became)
            if became.first is not None and not became.over:
                trigger = decoded(msgspec.json.encode(fields), run.path.name)
                requests.append((name.removesuffix(TAKEN), trigger, became))
        except UNREADABLE as error:  # the process that takes it reports the error
            seam.pass_on(error)
        known.add(name)
    return requests


def is_held(became: Became) -> bool:
    """Return True if the process that took a request is still running, and runs on this host."""
    host, _, pid = became.by.rpartition("-")
    return host == identity.HOST and pid.isdecimal() and identity.start_ticks(int(pid)) is not None


def switch(run: RunDir, off: bool) -> None:
    """Switch autoprof off in a run if `off` is True. Switch it on again if `off` is False.

    Raises:
        OSError: The folder can't be written.
    """
    if off:
        write_json(run.control / layout.OFF, {"off": True})
    else:
        (run.control / layout.OFF).unlink(missing_ok=True)


def waiting(run: RunDir) -> list[str]:
    """Return the names of the requests that no process has taken."""
    return [name for name in names(run) if name.endswith(ENDING)]


def states(run: RunDir) -> dict[str, Became]:
    """Return the states of the taken requests, as a dict from name to state. Unreadable files are skipped."""
    result = {}
    for name in names(run):
        if name.endswith(f"{ENDING}{TAKEN}"):
            with seam.suppress(*UNREADABLE):
                content = msgspec.json.decode(files.read(run.control / name, MOST_BYTES), type=dict[str, Any])
                result[name.removesuffix(TAKEN)] = msgspec.convert(content.get("became", {}), Became)
    return result


def _content(run: RunDir, path: str) -> bytes:
    # The owner of the run's directory may differ from this user, since some disks map root to another user.
    owners = {0, os.geteuid(), run.path.stat().st_uid}
    return files.read(path, MOST_BYTES, owners)


def _reason(error: Exception) -> str:
    """Return the reason why a request is refused, without secrets."""
    if isinstance(error, OSError):
        return "it is a link" if error.errno == errno.ELOOP else str(error.strerror)
    return hidden(" ".join(str(error).split()), 200)


class Registered(msgspec.Struct, frozen=True, kw_only=True):
    """Entry of a run in Ray's key-value store. The process that counts the run's steps writes the entry.

    Attributes:
        ticks: Start time of that process, from `identity.start_ticks`.
        uid: User that started the run; None in entries of older releases.
    """

    id: str
    directory: str
    host: str
    node: str
    pid: int
    ticks: int
    started: float = 0.0
    uid: int | None = None


def registered(run_id: str) -> str:
    """Return the key of a run's entry in Ray's key-value store."""
    return f"run/{run_id}"
