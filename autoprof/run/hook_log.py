"""Outcomes of hooks in this process, and errors of autoprof itself, as lines of its timeline."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from autoprof.base import files, seam
from autoprof.base.originals import threading
from autoprof.base.redact import hidden, redacted
from autoprof.run.timeline import Timeline
from autoprof.rundir import processes
from autoprof.rundir.layout import RunDir
from autoprof.rundir.records import ErrorLine, HookLine

_MAX_TITLE_CHARS, _MAX_COMMAND_BYTES = 200, 4096


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
    """Outcomes of hooks, written once a hook that is not passive was applied or has failed.

    Args:
        directory: The run directory.
        timeline: The timeline of this process. It calls `facts` and `lines` at the beginning of a part.
        join: Callback before the first lines are written.
        at_work: Callback at the first call of each hook.

    Attributes:
        hooks: The last line of each hook, by name.
        errors: The last line of each error, by place.
        node: Ray's id of the node of this process; empty if unknown.
        ray: Address of that node's cluster, HOST:PORT; empty if unknown.
        versions: The versions of the targets that this process imported, by package.
    """

    def __init__(
        self, directory: RunDir, timeline: Timeline, join: Callable[[], None], at_work: Callable[[], None]
    ) -> None:
        self._directory = directory
        self._timeline = timeline
        self._join = join
        self._at_work = at_work
        self.node = ""
        self.ray = ""
        self._lock = threading.RLock()
        self.hooks: dict[str, HookLine] = {}
        self.versions: dict[str, str] = {}
        self.errors: dict[str, ErrorLine] = {}
        # Lines that are not written yet, by kind and by name or place.
        self._unwritten: dict[tuple[str, str], HookLine | ErrorLine] = {}
        self._active_target = False
        self._worth_writing = False
        # The facts at the beginning of the last part.
        self._facts: dict[str, Any] = {}

    def add(self, hook: LoggedHook) -> None:
        """Record a hook that waits for its module to be imported."""
        with self._lock:
            self._active_target |= not hook.passive
            if hook.key not in self.hooks:
                self._put(HookLine(hook=hook.key, **hook.described(), state="skipped", reason=processes.WAITING))

    def _put(self, line: HookLine) -> None:
        self.hooks[line.hook] = line
        self._unwritten["hook", line.hook] = line

    def applied(self, hook: LoggedHook, reason: str = "") -> None:
        self._set(hook, "applied", reason)

    def skipped(self, hook: LoggedHook, reason: str) -> None:
        self._set(hook, "skipped", reason)

    def failed(self, hook: LoggedHook, reason: str) -> None:
        self._set(hook, "failed", reason)

    def called(self, key: str) -> None:
        """Record that a hook fired. Write a line at its first call."""
        line = self.hooks.get(key)
        if line is not None and not line.called:
            with self._lock:
                self._put(msgspec.structs.replace(line, called=True))
            # The driver of a run often only imports the target and calls `ray.init`: no hook of the target is applied.
            self._worth_writing |= self._active_target
            self.write()
            if self._worth_writing:
                self._at_work()

    def is_applied(self, key: str) -> bool:
        """Return True if a hook is applied in this process."""
        line = self.hooks.get(key)
        return line is not None and line.state == "applied"

    def was_called(self, key: str) -> bool:
        """Return True if a hook has fired in this process."""
        line = self.hooks.get(key)
        return line is not None and line.called

    def begin_anew(self) -> None:
        """Reset the log in a forked child: its hooks are still applied, but none has been called."""
        self._lock = threading.RLock()
        self.errors = {}
        self._facts = {}
        self.hooks = {key: msgspec.structs.replace(line, called=False) for key, line in self.hooks.items()}

    def leave(self) -> None:
        """Write the hooks of an imported target although none was applied. The run may have no `run.json` then."""
        if self._active_target and not self._worth_writing:
            self._timeline.begin_part()

    def error(self, where: str, text: str) -> None:
        """Count an error of autoprof itself."""
        with self._lock:
            before = self.errors.get(where)
            line = ErrorLine(where=where, count=before.count + 1 if before is not None else 1, last=hidden(text))
            self.errors[where] = line
        # Write at counts 1, 2, 4, 8, ...: a hook may fail in each of a million calls.
        if line.count.bit_count() == 1:
            self._unwritten["error", where] = line
            self.write()

    def switched_off(self, key: str, reason: str) -> None:
        """Record that a hook is disabled from now on."""
        with self._lock:
            if line := self.hooks.get(key):
                self._put(msgspec.structs.replace(line, state="failed", reason=reason))
        self.write()

    def _set(self, hook: LoggedHook, state: str, reason: str) -> None:
        self.add(hook)
        with self._lock:
            self._put(msgspec.structs.replace(self.hooks[hook.key], state=state, reason=hidden(reason)))
            self._worth_writing |= state != "skipped" and not hook.passive
        self.write()

    def facts(self) -> dict[str, Any]:
        """Return the fields of a process line that may change while the process runs."""
        lines = list(self.hooks.values())
        states = {line.hook: "called" if line.called else line.state for line in lines}
        facts = {"process": process_title(), "node": self.node, "ray": self.ray, "versions": dict(self.versions)}
        self._facts = facts
        return facts | {"hooks": {key: state for key, state in states.items() if state != "skipped"}}

    def lines(self, whole: bool) -> list[HookLine | ErrorLine]:
        """Return the lines for the beginning of a part: of all hooks, or if not `whole`, of the hooks that failed."""
        if whole:
            self._unwritten = {}
        hooks = [line for line in list(self.hooks.values()) if whole or line.state == "failed"]
        return [*hooks, *list(self.errors.values())]

    def write(self) -> None:
        """Write new lines, if one of the hooks makes this process part of the run. Never raises."""
        if not self._worth_writing:
            return
        # Errors end here, because this also runs while an error of autoprof is being reported.
        with seam.guard("the outcomes of hooks can't be written", self._directory.report) as writing:
            # Join without the lock: it may import modules of Ray, and a thread in such an import may need the lock.
            self._join()
            if not self._timeline.has_file:
                self._timeline.begin_part()
            if self._unwritten:
                self._write_new()
        if writing.failed:
            self._worth_writing = False

    def _write_new(self) -> None:
        lines, self._unwritten = list(self._unwritten.values()), {}
        facts = {"process": process_title(), "node": self.node, "ray": self.ray, "versions": self.versions}
        if facts != self._facts:
            self._timeline.begin_part()
        self._timeline.write(*lines)


def process_title() -> str:
    """Return this process's title in `ps`, which Ray sets to the actor's class; for spawned children their name."""
    command = files.text("/proc/self/cmdline", _MAX_COMMAND_BYTES)
    words = command.split("\0") if command else sys.argv
    if "--multiprocessing-fork" in words:
        import multiprocessing

        return hidden(multiprocessing.current_process().name)
    words = [word for word in words if word][:4]
    shown = redacted(words)
    if len(words) == 1:  # a title, so undo the shell quoting
        shown = shlex.split(shown)[0]
    return shown if len(shown) <= _MAX_TITLE_CHARS else f"{shown[:_MAX_TITLE_CHARS]}..."
