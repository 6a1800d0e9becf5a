"""Outcome of each hook in this process: `hooks/<host>-<pid>.json`."""

from __future__ import annotations

import itertools
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from autoprof.base import files, identity, interrupts, log
from autoprof.base.originals import io, os, threading, time
from autoprof.base.redact import hidden, redacted
from autoprof.rundir import layout, processes
from autoprof.rundir.file_names import JSON
from autoprof.rundir.layout import RunDir
from autoprof.rundir.records import ErrorEntry, HookEntry, HooksFile

_LONGEST_TITLE = 200


class Watched(Protocol):
    """A hook, as its log sees it."""

    @property
    def key(self) -> str:
        """Return its name: recipe and hook."""

    @property
    def passive(self) -> bool:
        """Return whether it makes no process part of a run by itself."""

    def described(self) -> dict[str, Any]:
        """Return the module, the attribute and the behaviour."""


class HookLog:
    """Outcomes of hooks, written as soon as a hook of a target that is not passive was applied or failed.

    Attributes:
        node: Ray's id of the node that this process is on; empty where it is not known.
        ray: Address of that node's cluster, HOST:PORT; empty where it is not known.
        versions: The versions of the targets that this process imported, by their names.
    """

    def __init__(self, directory: RunDir, join: Callable[[], None], at_work: Callable[[], None]) -> None:
        self._directory = directory
        self._join = join
        # Called when a hook is called for the first time.
        self._at_work = at_work
        self.node = ""
        self.ray = ""
        self._lock = threading.RLock()
        self._hooks: dict[str, HookEntry] = {}
        self.versions: dict[str, str] = {}
        self._errors: dict[str, ErrorEntry] = {}
        self._active_target = False
        self._worth_writing = False
        # The process whose file it is, and the file.
        self._file: tuple[int, Path] | None = None

    def add(self, hook: Watched) -> None:
        """Note a hook that waits for its module."""
        with self._lock:
            self._active_target |= not hook.passive
            waiting = HookEntry(**hook.described(), state="skipped", reason=processes.WAITING)
            self._hooks.setdefault(hook.key, waiting)

    def applied(self, hook: Watched, reason: str = "") -> None:
        self._set(hook, "applied", reason)

    def skipped(self, hook: Watched, reason: str) -> None:
        self._set(hook, "skipped", reason)

    def failed(self, hook: Watched, reason: str) -> None:
        self._set(hook, "failed", reason)

    def called(self, key: str) -> None:
        """Note that a hook fired; write down the first time."""
        entry = self._hooks.get(key)
        if entry is not None and entry.called is None:
            entry.called = time.time()
            # The driver of a run often does no more than import the target and call ray.init.
            self._worth_writing |= self._active_target
            self.write()
            if self._worth_writing:
                self._at_work()

    def is_applied(self, key: str) -> bool:
        """Return whether a hook is applied in this process."""
        entry = self._hooks.get(key)
        return entry is not None and entry.state == "applied"

    def was_called(self, key: str) -> bool:
        """Return whether a hook fired in this process."""
        entry = self._hooks.get(key)
        return entry is not None and entry.called is not None

    def begin_anew(self) -> None:
        """Begin anew in a forked child: the hooks are applied there, too, and none has been called."""
        self._lock = threading.RLock()
        self._errors = {}
        for entry in self._hooks.values():
            entry.called = None

    def leave(self) -> None:
        """Write down the hooks of a target that was imported, though none was applied. The run's directory may be
        without `run.json` then.

        Raises:
            OSError: They can't be written.
        """
        if self._active_target and not self._worth_writing:
            layout.write_json(self._own_file(), self.content())

    def error(self, where: str, text: str) -> None:
        """Count an error of autoprof's own."""
        with self._lock:
            entry = self._errors.setdefault(where, ErrorEntry())
            entry.count += 1
            entry.last = hidden(text)
            often = entry.count
        # A hook that fails in each of a million calls must not write a file in each.
        if often.bit_count() == 1:
            self.write()

    def switched_off(self, key: str, reason: str) -> None:
        """Note that a hook is disabled from now on."""
        with self._lock:
            if entry := self._hooks.get(key):
                entry.state, entry.reason = "failed", reason
        self.write()

    def summary(self) -> dict[str, Any]:
        """Return what `run.json` says of all processes: hosts, versions, recipes used."""
        return processes.summary(self._directory, self.versions)

    def _set(self, hook: Watched, state: str, reason: str) -> None:
        self.add(hook)
        with self._lock:
            entry = self._hooks[hook.key]
            entry.state, entry.reason = state, hidden(reason)
            self._worth_writing |= state != "skipped" and not hook.passive
        self.write()

    def content(self) -> dict[str, Any]:
        """Return the content of this process's file."""
        with self._lock:
            content = HooksFile(
                host=identity.HOST,
                node=self.node,
                ray=self.ray,
                pid=os.getpid(),
                parent=os.getppid(),
                process=process_title(),
                python=sys.version.split()[0],
                versions=self.versions,
                hooks=self._hooks,
                errors=self._errors,
            )
            said: dict[str, Any] = msgspec.to_builtins(content)
            return said

    def write(self) -> None:
        """Write this process's file, if one of its hooks makes the process part of the run. Raises nothing."""
        if not self._worth_writing:
            return
        try:
            # Without the lock: it may import modules of Ray's, for which a thread that comes here may have to wait.
            self._join()
            with self._lock:
                layout.write_json(self._own_file(), self.content())
        # Nobody else stops it: this runs where an error of ours is reported, too.
        except Exception as error:
            interrupts.pass_on(error)
            self._worth_writing = False
            log.warning_once(self._directory.unwritable(error))

    def _own_file(self) -> Path:
        """Return the file of this process: a new one, where an earlier process of the run had the same pid."""
        if self._file is None or self._file[0] != os.getpid():
            self._directory.make(self._directory.hooks)
            path = self._directory.process_file("hooks", JSON)
            again = itertools.count(2)
            while files.exists(path, follow=False):
                path = path.with_name(f"{identity.HOST}-{os.getpid()}.{next(again)}{JSON}")
            self._file = os.getpid(), path
        return self._file[1]


def process_title() -> str:
    """Return what `ps` shows for this process: Ray sets it to the actor's class. Spawned children have their name."""
    try:
        with io.open("/proc/self/cmdline", "rb", opener=files.descriptor) as file:
            words = file.read(4096).decode(errors="replace").split("\0")
    except OSError as error:
        interrupts.pass_on(error)
        words = sys.argv
    if "--multiprocessing-fork" in words:
        import multiprocessing

        return hidden(multiprocessing.current_process().name)
    words = [word for word in words if word][:4]
    shown = redacted(words)
    if len(words) == 1:  # a title, which no shell takes
        shown = shlex.split(shown)[0]
    return shown if len(shown) <= _LONGEST_TITLE else f"{shown[:_LONGEST_TITLE]}..."
