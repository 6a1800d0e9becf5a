"""Log of the outcomes of hooks in this process, and of errors of autoprof itself, as lines of the process's journal."""

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
    """The attributes of a hook that `HookLog` reads."""

    @property
    def key(self) -> str:
        """Return the name of the hook, which begins with the name of its recipe: `verl/update-actor`."""

    @property
    def passive(self) -> bool:
        """Return True if this hook alone does not make a process part of a run when it is applied."""

    def described(self) -> dict[str, Any]:
        """Return the fields `module`, `attribute` and `behaviour` of the hook's journal line."""


class HookLog:
    """The outcomes of the hooks in this process, and the errors of autoprof.

    Nothing is written until a hook that is not passive was applied or has failed, because the process may not be a part
    of the run before.

    Args:
        directory: The run directory.
        timeline: The timeline of this process. The timeline calls `facts` and `lines` at the beginning of a part.
        join: Callback that is called before lines are written.
        at_work: Callback that is called at the first call of each hook.

    Attributes:
        hooks: Dict from the name of a hook to the last line of that hook.
        errors: Dict from a place in autoprof to the last line about an error there.
        node: Ray's id of the node of this process; empty if unknown.
        ray: The address of the node's cluster, HOST:PORT; empty if unknown.
        versions: Dict from package to version, for the targets that this process imported.
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
        # Lines that are not written yet, by kind (`hook` or `error`) and by the name of the hook or the place.
        self._unwritten: dict[tuple[str, str], HookLine | ErrorLine] = {}
        self._active_target = False
        self._worth_writing = False
        # The facts that the beginning of the last part has.
        self._facts: dict[str, Any] = {}

    def add(self, hook: LoggedHook) -> None:
        """Record that a hook waits until its module is imported. Do nothing if the hook is already known."""
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
        """Record that a hook fired. At the first call, write a line."""
        line = self.hooks.get(key)
        if line is not None and not line.called:
            with self._lock:
                self._put(msgspec.structs.replace(line, called=True))
            # The driver of a run often only imports the target and calls `ray.init`. No hook of the target is then
            # applied, but the hook of `ray.init` is called.
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
        """Reset the log in a forked child: the hooks of the parent are applied in the child, but not called yet."""
        self._lock = threading.RLock()
        self.errors = {}
        self._facts = {}
        self.hooks = {key: msgspec.structs.replace(line, called=False) for key, line in self.hooks.items()}

    def leave(self) -> None:
        """If a target was imported but none of its hooks was applied, write the journal with these hooks.

        The run may have no `run.json` in this case.
        """
        if self._active_target and not self._worth_writing:
            self._timeline.begin_part()

    def error(self, where: str, text: str) -> None:
        """Count an error of autoprof itself at the place `where`, and write a line at some of the counts."""
        with self._lock:
            last_line = self.errors.get(where)
            line = ErrorLine(where=where, count=last_line.count + 1 if last_line is not None else 1, last=hidden(text))
            self.errors[where] = line
        # Write a line only at the counts 1, 2, 4, 8, ..., because a hook may fail in each of a million calls.
        if line.count.bit_count() == 1:
            self._unwritten["error", where] = line
            self.write()

    def switched_off(self, key: str, reason: str) -> None:
        """Record that a hook is disabled in this process from now on."""
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
        """Return those fields of the process line that may change while the process runs."""
        lines = list(self.hooks.values())
        states = {line.hook: "called" if line.called else line.state for line in lines}
        facts = {"process": process_title(), "node": self.node, "ray": self.ray, "versions": dict(self.versions)}
        self._facts = facts
        return facts | {"hooks": {key: state for key, state in states.items() if state != "skipped"}}

    def lines(self, whole: bool) -> list[HookLine | ErrorLine]:
        """Return the lines of hooks and errors for the beginning of a part of the journal.

        If `whole` is true, the part begins a file, and all hooks have a line. Otherwise, only hooks that failed do.
        """
        if whole:
            self._unwritten = {}
        hooks = [line for line in list(self.hooks.values()) if whole or line.state == "failed"]
        return [*hooks, *list(self.errors.values())]

    def write(self) -> None:
        """Write the new lines, if one of the hooks has made this process part of the run. Never raises."""
        if not self._worth_writing:
            return
        # Errors are not passed to the caller, because the caller may be reporting an error of autoprof.
        with seam.guard("the outcomes of hooks can't be written", self._directory.report) as writing:
            # Do not hold the lock here. `_join` may import modules of Ray, and another thread that imports these
            # modules may need the lock.
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
    """Return the title that `ps` shows for this process. Ray sets the title to the class of the actor.

    For a child that multiprocessing spawned, return the name of the child instead.
    """
    command = files.text("/proc/self/cmdline", _MAX_COMMAND_BYTES)
    words = command.split("\0") if command else sys.argv
    if "--multiprocessing-fork" in words:
        import multiprocessing

        return hidden(multiprocessing.current_process().name)
    words = [word for word in words if word][:4]
    title = redacted(words)
    if len(words) == 1:  # a title and not a command line, so undo the shell quoting
        title = shlex.split(title)[0]
    return title if len(title) <= _MAX_TITLE_CHARS else f"{title[:_MAX_TITLE_CHARS]}..."
