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

_MAX_TITLE_CHARS = 200


class LoggedHook(Protocol):
    """The attributes of a hook that its log needs."""

    @property
    def key(self) -> str:
        """Return its name: recipe and hook."""

    @property
    def passive(self) -> bool:
        """Return True if applying this hook alone does not make a process part of a run."""

    def described(self) -> dict[str, Any]:
        """Return the module, the attribute and the behaviour."""


class HookLog:
    """Outcomes of hooks, written to a file once a hook that is not passive was applied or has failed.

    Attributes:
        node: Ray's id of the node of this process; empty if unknown.
        ray: Address of that node's cluster, HOST:PORT; empty if unknown.
        versions: The versions of the targets that this process imported, by package.
    """

    def __init__(self, directory: RunDir, join: Callable[[], None], at_work: Callable[[], None]) -> None:
        self._directory = directory
        self._join = join
        # Callback at the first call of each hook.
        self._at_work = at_work
        self.node = ""
        self.ray = ""
        self._lock = threading.RLock()
        self._hooks: dict[str, HookEntry] = {}
        self.versions: dict[str, str] = {}
        self._errors: dict[str, ErrorEntry] = {}
        self._active_target = False
        self._worth_writing = False
        # The pid of the process that wrote the file, and the file.
        self._file: tuple[int, Path] | None = None

    def add(self, hook: LoggedHook) -> None:
        """Record a hook that waits for its module to be imported."""
        with self._lock:
            self._active_target |= not hook.passive
            waiting = HookEntry(**hook.described(), state="skipped", reason=processes.WAITING)
            self._hooks.setdefault(hook.key, waiting)

    def applied(self, hook: LoggedHook, reason: str = "") -> None:
        self._set(hook, "applied", reason)

    def skipped(self, hook: LoggedHook, reason: str) -> None:
        self._set(hook, "skipped", reason)

    def failed(self, hook: LoggedHook, reason: str) -> None:
        self._set(hook, "failed", reason)

    def called(self, key: str) -> None:
        """Record that a hook fired. Write the file at its first call."""
        entry = self._hooks.get(key)
        if entry is not None and entry.called is None:
            entry.called = time.time()
            # The driver of a run often only imports the target and calls `ray.init`: no hook of the target is applied.
            self._worth_writing |= self._active_target
            self.write()
            if self._worth_writing:
                self._at_work()

    def is_applied(self, key: str) -> bool:
        """Return True if a hook is applied in this process."""
        entry = self._hooks.get(key)
        return entry is not None and entry.state == "applied"

    def was_called(self, key: str) -> bool:
        """Return True if a hook has fired in this process."""
        entry = self._hooks.get(key)
        return entry is not None and entry.called is not None

    def begin_anew(self) -> None:
        """Reset the log in a forked child: its hooks are still applied, but none has been called."""
        self._lock = threading.RLock()
        self._errors = {}
        for entry in self._hooks.values():
            entry.called = None

    def leave(self) -> None:
        """Write the hooks of an imported target although none was applied. The run may have no `run.json` then.

        Raises:
            OSError: The file can't be written.
        """
        if self._active_target and not self._worth_writing:
            layout.write_json(self._own_file(), self.content())

    def error(self, where: str, text: str) -> None:
        """Count an error of autoprof itself."""
        with self._lock:
            entry = self._errors.setdefault(where, ErrorEntry())
            entry.count += 1
            entry.last = hidden(text)
            count = entry.count
        # Write at counts 1, 2, 4, 8, ...: a hook may fail in each of a million calls.
        if count.bit_count() == 1:
            self.write()

    def switched_off(self, key: str, reason: str) -> None:
        """Record that a hook is disabled from now on."""
        with self._lock:
            if entry := self._hooks.get(key):
                entry.state, entry.reason = "failed", reason
        self.write()

    def summary(self) -> dict[str, Any]:
        """Return the hosts, versions and used recipes of all processes, as fields of `run.json`."""
        return processes.summary(self._directory, self.versions)

    def _set(self, hook: LoggedHook, state: str, reason: str) -> None:
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
            fields: dict[str, Any] = msgspec.to_builtins(content)
            return fields

    def write(self) -> None:
        """Write this process's file, if one of its hooks makes the process part of the run. Never raises."""
        if not self._worth_writing:
            return
        try:
            # Join without the lock: it may import modules of Ray, and a thread in such an import may need the lock.
            self._join()
            with self._lock:
                layout.write_json(self._own_file(), self.content())
        # Catch everything: this also runs while an error of autoprof is being reported.
        except Exception as error:
            interrupts.pass_on(error)
            self._worth_writing = False
            log.warning_once(self._directory.unwritable(error))

    def restore(self) -> None:
        """Write this process's file again if it was moved or removed. Never raises."""
        if self._file is not None and not files.exists(self._file[1]):
            self.write()

    def _own_file(self) -> Path:
        """Return the file of this process. If an earlier process of the run had the same pid, use a new name."""
        if self._file is None or self._file[0] != os.getpid():
            self._directory.make(self._directory.hooks)
            path = self._directory.process_file("hooks", JSON)
            again = itertools.count(2)
            while files.exists(path, follow=False):
                path = path.with_name(f"{identity.HOST}-{os.getpid()}.{next(again)}{JSON}")
            self._file = os.getpid(), path
        return self._file[1]


def process_title() -> str:
    """Return this process's title in `ps`, which Ray sets to the actor's class; for spawned children their name."""
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
    if len(words) == 1:  # a title, so undo the shell quoting
        shown = shlex.split(shown)[0]
    return shown if len(shown) <= _MAX_TITLE_CHARS else f"{shown[:_MAX_TITLE_CHARS]}..."
