"""Inbox of requests to the trainer, polled once a step: one look at a folder, one read of Ray's key-value store.

The folder is `control/` of the run. It is listed only where its times have changed since. The key is the bell: whoever
leaves a request in Ray's key-value store rings it then, by giving it another value.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from autoprof.base import files, identity, interrupts, log
from autoprof.base.originals import os, time
from autoprof.run import runtime
from autoprof.run.cluster import kv
from autoprof.rundir.layout import RunDir
from autoprof.windows import trigger_requests
from autoprof.windows.trigger_requests import Trigger

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
        self.names = trigger_requests.names(run) if mark is not None else []
        return True


class Bell:
    """The requests that came through Ray, where this process is connected to it."""

    def __init__(self) -> None:
        self._heard: bytes | None = None
        self._known = False

    def take(self, run: RunDir) -> list[tuple[str, Trigger]]:
        """Return the requests that nobody has taken, oldest first, by name. Raises nothing."""
        if not kv.up():
            return []
        try:
            if not self._known:
                self._known = True
                register(run)
            rung = kv.get(bell(run.path.name))
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
        ticks=identity.began(os.getpid()) or 0,
        command=here.info.command if here is not None else "",
        started=here.info.started if here is not None else time.time(),
        uid=here.info.uid if here is not None else os.geteuid(),
    )
    kv.put(registered(run.path.name), msgspec.json.encode(told))


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
    for key in kv.keys(prefix):
        name = key.removeprefix(prefix)
        content = kv.get(key)
        if not kv.delete(key) or content is None:  # somebody else was faster
            continue
        if not trigger_requests.NAME.fullmatch(name):
            log.warning(f"a request through Ray is refused: its name is {name[:80]!r}")
            continue
        try:
            taken.append((name, trigger_requests.decoded(content, run.path.name)))
        except trigger_requests.UNREADABLE as error:
            interrupts.pass_on(error)
            trigger_requests.refuse(run, name, error)
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
