"""Requests of `autoprof trigger`: files in a run's `control/` folder, polled once a step.

A request is `<name>.json`. The process that takes it renames it to `<name>.json.taken` and records its progress there,
which `--wait` reads. A rejected request is kept as `<name>.json.refused`; its `.taken` file has the reason. In Ray, a
key of the key-value store changes with each new request, so that a poll is one look at the folder and one read.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import msgspec

from autoprof.base import files, identity, interrupts, log
from autoprof.base.originals import os, time
from autoprof.base.redact import hidden
from autoprof.config import structs, values
from autoprof.config.selection import STEPS_TAKE, Steps
from autoprof.run import cluster, runtime
from autoprof.rundir import layout
from autoprof.rundir.layout import RunDir, write_json

TAKEN = ".taken"
REFUSED = ".refused"
ENDING = ".json"
MOST_BYTES = 64 << 10
# What requests are called. A name that comes from elsewhere becomes part of a path.
NAME = re.compile(r"[0-9]{1,20}-[0-9]{1,10}-[0-9a-f]{8}\.json")
_MOST_STEPS = 1_000_000
# Why a request can't be read.
UNREADABLE = (OSError, ValueError, RecursionError, msgspec.MsgspecError)


@structs.complete
class Trigger(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"since": "from"}):
    """A window that somebody asked for while the run was going on, or the switch of the whole run.

    Attributes:
        run: The id of the run that was asked.
        steps: How many steps.
        since: The number of the first one; without it, the one that begins next.
        at: Steps as in `AUTOPROF_STEPS` in place of those two; `+1` is the step that begins next.
        overrides: Settings of that window: those of `values.WINDOW_FIELDS`.
        switch: What autoprof is switched in the run, if that is what was asked for.
        reason: Why, where nobody has asked: what the run itself saw (`monitor.py`).
    """

    run: str = ""
    steps: int = 1
    since: int | None = None
    at: str = ""
    overrides: dict[str, Any] = {}
    switch: Literal["", "off", "on"] = ""
    reason: str = ""

    def __str__(self) -> str:
        if self.at:
            return f"steps {self.at}"
        if self.since is None:
            return "the next step" if self.steps == 1 else f"the next {self.steps} steps"
        return f"step {self.since}" if self.steps == 1 else f"{self.steps} steps from {self.since} on"


@structs.complete
class Became(msgspec.Struct, kw_only=True):
    """The state of a request.

    Attributes:
        state: `taken`, and none of its steps has begun; `open`, one has; `done`, none is to come; `joined`, one with
            the same content was open already; `refused`.
        by: Host and pid of the process that took it.
        captured: The steps that were captured and are through.
        going_on: The one that is being captured.
        joined: The name of the request that it joined.
        reason: Why it was refused, or is done with less than was asked for.
    """

    state: Literal["taken", "open", "done", "joined", "refused"] = "taken"
    by: str = ""
    captured: list[int] = []
    going_on: int | None = None
    joined: str = ""
    reason: str = ""

    @property
    def over(self) -> bool:
        """Return whether nothing comes of it any more."""
        return self.state in ("done", "joined", "refused")


def checked(trigger: Trigger) -> Trigger:
    """Return the trigger with its values as settings have them.

    Raises:
        SettingsError: One is wrong.
    """
    if not 1 <= trigger.steps <= _MOST_STEPS:
        raise values.SettingsError(f"steps: got {trigger.steps}; it takes a number of steps from 1 to {_MOST_STEPS}")
    if trigger.since is not None and trigger.since < 0:
        raise values.SettingsError(f"from: got {trigger.since}; it takes a step number from 0")
    if trigger.at and (trigger.since is not None or trigger.steps != 1):
        raise values.SettingsError(f"at: got {trigger.at!r}; it replaces steps and from; give it alone")
    if trigger.at:
        values.steps(trigger.at, "at")
        if not Steps.parse(trigger.at).any:
            raise values.SettingsError(f"at: got {trigger.at!r}; it takes {STEPS_TAKE}, or a mixture")
    return msgspec.structs.replace(trigger, overrides=values.overrides(trigger.overrides))


def decoded(content: bytes, run_id: str) -> Trigger:
    """Return the trigger that a request holds, checked.

    Raises:
        ValueError: It is none, or another run's.
    """
    if len(content) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES} bytes")
    trigger = msgspec.json.decode(content, type=Trigger)
    if trigger.run != run_id:
        raise ValueError(f"it is for run {trigger.run[:80]!r}")
    return checked(trigger)


def new_name() -> str:
    """Return a name for a request: in order of their time, and nobody else's."""
    return f"{time.time_ns()}-{os.getpid()}-{os.urandom(4).hex()}{ENDING}"


def ask(run: RunDir, trigger: Trigger) -> Path:
    """Leave a request for the run's trainer.

    Raises:
        OSError: It can't be written.
    """
    files.open_as(run.path)
    path = run.control / new_name()
    write_json(path, msgspec.to_builtins(msgspec.structs.replace(trigger, run=run.path.name)))
    return path


def names(run: RunDir) -> list[str]:
    """Return what lies in `control/`, oldest requests first."""
    try:
        return sorted(os.listdir(run.control))
    except OSError as error:  # nobody has asked for anything
        interrupts.pass_on(error)
        return []


def take(run: RunDir, there: Iterable[str] | None = None) -> list[tuple[str, Trigger]]:
    """Take the requests that nobody has taken, oldest first, by name. Each is taken once. Raises nothing.

    Args:
        run: Where to look.
        there: What lies in `control/`, where that is known.
    """
    taken = []
    for name in names(run) if there is None else there:
        if not name.endswith(ENDING):
            continue
        path = f"{run.control / name}{TAKEN}"
        try:
            os.replace(run.control / name, path)
        except FileNotFoundError as error:  # somebody else was faster
            interrupts.pass_on(error)
            continue
        except OSError as error:
            interrupts.pass_on(error)
            log.warning_once(
                f"{run.control / name}: can't take the request: {error.strerror}; the folder must belong to this user"
            )
            continue
        try:
            taken.append((name, decoded(_content(run, path), run.path.name)))
        except UNREADABLE as error:
            interrupts.pass_on(error)
            with interrupts.suppress(OSError):
                os.replace(path, f"{run.control / name}{REFUSED}")
            refuse(run, name, error)
    return taken


def refuse(run: RunDir, name: str, error: Exception) -> None:
    """Say why a request is refused. Raises nothing."""
    why = _why(error)
    log.warning(f"the request {run.control / name} is refused: {why}")
    note(run, name, None, Became(state="refused", reason=why))


def note(run: RunDir, name: str, trigger: Trigger | None, became: Became) -> None:
    """Say what has become of a request that was taken. Raises nothing."""
    became.by = f"{identity.HOST}-{os.getpid()}"
    asked = {} if trigger is None else msgspec.to_builtins(trigger)
    try:
        write_json(Path(f"{run.control / name}{TAKEN}"), asked | {"became": msgspec.to_builtins(became)})
    except OSError as error:
        interrupts.pass_on(error)
        log.warning_once(f"{run.control}: outcomes of trigger requests can't be written there: {error.strerror}")


def read_along(run: RunDir, there: Iterable[str], known: set[str]) -> list[tuple[str, Trigger, list[int]]]:
    """Return the requests that are there and not over, taken or not, less those in `known`, which they are added to.

    With each come the steps of it that have begun in the process that took it.
    """
    found = []
    for name in sorted({name.removesuffix(TAKEN) for name in there}):
        if name in known or not name.endswith(ENDING):
            continue
        known.add(name)
        for ending in ("", TAKEN):
            try:
                fields = msgspec.json.decode(_content(run, f"{run.control / name}{ending}"), type=dict[str, Any])
                became = msgspec.convert(fields.pop("became", {}) if ending else {}, Became)
                if not became.over:
                    begun = [*became.captured, *([] if became.going_on is None else [became.going_on])]
                    found.append((name, decoded(msgspec.json.encode(fields), run.path.name), begun))
                break
            except FileNotFoundError as error:  # it has been taken just now
                interrupts.pass_on(error)
                continue
            except UNREADABLE as error:  # whoever takes it says so
                interrupts.pass_on(error)
                break
    return found


def switch(run: RunDir, off: bool) -> None:
    """Switch autoprof off in a run that is going on, or on again.

    Raises:
        OSError: The folder can't be written.
    """
    if off:
        write_json(run.control / layout.OFF, {"off": True})
    else:
        (run.control / layout.OFF).unlink(missing_ok=True)


def waiting(run: RunDir) -> list[str]:
    """Return the names of the requests that nobody has taken."""
    return [name for name in names(run) if name.endswith(ENDING)]


def states(run: RunDir) -> dict[str, Became]:
    """Return what became of the requests that were taken, by name. What can't be read is left out."""
    found = {}
    for name in names(run):
        if name.endswith(f"{ENDING}{TAKEN}"):
            with interrupts.suppress(*UNREADABLE):
                content = msgspec.json.decode(files.read(run.control / name, MOST_BYTES), type=dict[str, Any])
                found[name.removesuffix(TAKEN)] = msgspec.convert(content.get("became", {}), Became)
    return found


def _content(run: RunDir, path: str) -> bytes:
    # The run's directory says who it belongs to, where a disk has other owners for root.
    owners = {0, os.geteuid(), run.path.stat().st_uid}
    return files.read(path, MOST_BYTES, owners)


def _why(error: Exception) -> str:
    """Return why a request is refused, without secrets."""
    if isinstance(error, OSError):
        return "it is a link" if error.errno == errno.ELOOP else str(error.strerror)
    return hidden(" ".join(str(error).split()), 200)


# The times of files are coarse: up to 2 s (FAT; 1 s on older NFS and HFS+). What changes within that after a change may
# leave a folder's as they are.
_COARSE_S = 2.0
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_Mark = tuple[int, int, int, int]


class Folder:
    """A folder that is looked at again and again, and listed where something may have changed in it.

    Attributes:
        names: What lay in it when it was listed last.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self._mark: _Mark | None = None
        # When the mark was first seen. By this host's clock alone: another may have set the folder's times.
        self._since = float("-inf")
        self._settled = False
        self._tells: bool | None = None

    def look(self, run: RunDir) -> bool:
        """Return whether the folder was listed, since it is another than at the last look, or might be."""
        if self._tells is None:
            self._tells = _tells(run.control)
        mark, now = _mark(run.control), time.monotonic()
        if mark != self._mark:
            self._mark, self._since = mark, now
        elif self._settled and (self._tells or mark is None):
            return False
        self._settled = now - self._since >= _COARSE_S
        self.names = names(run) if mark is not None else []
        return True


class Bell:
    """The requests that came through Ray, where this process is connected to it."""

    def __init__(self) -> None:
        self._heard: bytes | None = None
        self._known = False

    def take(self, run: RunDir) -> list[tuple[str, Trigger]]:
        """Return the requests that nobody has taken, oldest first, by name. Raises nothing."""
        if not cluster.is_up():
            return []
        try:
            if not self._known:
                self._known = True
                register(run)
            rung = cluster.get(bell(run.path.name))
            if rung == self._heard:
                return []
            taken = _taken(run)
            self._heard = rung
            return taken
        except Exception as error:
            interrupts.pass_on(error)
            log.warning_once(f"a trigger request sent through Ray can't be read: {type(error).__name__}: {error}")
            return []


class Registered(msgspec.Struct, frozen=True, kw_only=True):
    """A run as Ray's store has it, written by the process that counts its steps.

    Attributes:
        ticks: The start of that process (`identity.began`).
        uid: The user that started the run; None in entries of older releases.
    """

    id: str
    directory: str
    host: str
    node: str
    pid: int
    ticks: int
    command: str = ""
    started: float = 0.0
    uid: int | None = None


def register(run: RunDir) -> None:
    """Say in Ray's key-value store that this process is the one to ask in this run."""
    import ray

    here = runtime.current()
    told = Registered(
        id=run.path.name,
        directory=str(run.path),
        host=identity.HOST,
        node=ray.get_runtime_context().get_node_id(),
        pid=os.getpid(),
        ticks=identity.start_ticks(os.getpid()) or 0,
        command=here.info.command if here is not None else "",
        started=here.info.started if here is not None else time.time(),
        uid=here.info.uid if here is not None else os.geteuid(),
    )
    cluster.put(registered(run.path.name), msgspec.json.encode(told))


def registered(run_id: str) -> str:
    """Return the key of a run."""
    return f"run/{run_id}"


def bell(run_id: str) -> str:
    """Return the key of a run's bell."""
    return f"bell/{run_id}"


def asked(run_id: str, name: str = "") -> str:
    """Return the key of a request, or how the keys of all requests to a run begin."""
    return f"ask/{run_id}/{name}"


def _taken(run: RunDir) -> list[tuple[str, Trigger]]:
    taken = []
    prefix = asked(run.path.name)
    for key in cluster.keys(prefix):
        name = key.removeprefix(prefix)
        content = cluster.get(key)
        if not cluster.delete(key) or content is None:  # somebody else was faster
            continue
        if not NAME.fullmatch(name):
            log.warning(f"a request through Ray is refused: its name is {name[:80]!r}")
            continue
        try:
            taken.append((name, decoded(content, run.path.name)))
        except UNREADABLE as error:
            interrupts.pass_on(error)
            refuse(run, name, error)
    return taken


def _mark(folder: Path) -> _Mark | None:
    """Return what is another after a change in the folder; None where it is not there.

    The folder is opened for it, since NFS asks its server then, as it does not for each `stat` (Linux,
    fs/nfs/dir.c, nfs_lookup_verify_inode).
    """
    try:
        descriptor = files.descriptor(folder, _OPEN)
    except OSError as error:
        interrupts.pass_on(error)
        return None
    try:
        found = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    # ctime too: nobody sets it, as `_tells` does the other.
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns


def _tells(folder: Path) -> bool:
    """Return whether the folder's time changes with what comes into it. Some network file systems' never does.

    The folder is made where it is not there: that there was none may be remembered for a minute on NFS, too.
    """
    if not files.is_folder(folder.parent):
        return True
    probe = folder / f".probe-{os.urandom(4).hex()}"
    try:
        files.folder(folder)
        os.utime(folder, (1, 1))
        before = os.stat(folder).st_mtime_ns
        os.close(files.create(probe))
        with interrupts.suppress(FileNotFoundError):
            os.unlink(probe)
        return os.stat(folder).st_mtime_ns != before
    except OSError as error:
        interrupts.pass_on(error)
        return False
