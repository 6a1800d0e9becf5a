"""One process's view of its run: settings, run directory, hooks, timeline and caught errors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from autoprof import __version__, _boot
from autoprof.base import files, identity, interrupts, log, process
from autoprof.base.exception_text import described
from autoprof.base.originals import os, threading, time
from autoprof.base.redact import hidden, hidden_in
from autoprof.config import sources
from autoprof.config.values import GROUP, SettingsError
from autoprof.run import info as run_info
from autoprof.run import outcome, seat
from autoprof.run.cluster import nodes
from autoprof.run.hook_log import HookLog
from autoprof.run.info import RunInfo
from autoprof.run.timeline import Timeline
from autoprof.run.watch import watcher
from autoprof.rundir import deaths, decoder, layout, previous_run, runs
from autoprof.rundir.layout import RunDir
from autoprof.rundir.records import Attempt, RunFile, RunNode, RunSettings


class Runtime:
    """One process of a run."""

    def __init__(self, info: RunInfo) -> None:
        self.info = info
        self.settings = info.settings
        self.rundir = RunDir(Path(info.directory))
        files.open_to_group(info.settings.access == GROUP)
        self.hooks = HookLog(self.rundir, self._join, lambda: watcher.start(self))
        self.timeline = Timeline(self.rundir)
        self._joined = False
        self._registered = False
        # The nodes that the run worked on, as far as they are known when it ends.
        self.nodes: list[dict[str, Any]] = []
        # The attempts at this run before it was resumed.
        self._earlier: list[Attempt] = []
        # Whether autoprof.stop() ends it: the end of the process says nothing of it then.
        self.stopped = False

    @property
    def started_here(self) -> bool:
        """Return whether this process started the run."""
        return self.info.host == identity.HOST and self.info.pid == os.getpid()

    @property
    def decides(self) -> bool:
        """Return whether this process takes what is asked for, of those that each run the trainer."""
        return identity.own_rank() == 0 or (self.started_here and seat.own() is None)

    @property
    def speaks(self) -> bool:
        """Return whether this process speaks for the whole run: that which started it, or of ranks the first."""
        if self.started_here:
            return True
        of_launcher = self.info.host == identity.HOST and self.info.pid == os.getppid() and "RANK" in os.environ
        return (of_launcher or seat.own() is not None) and identity.own_rank() == 0

    def _join(self) -> None:
        """Make the run directory with the first hook that is applied: a process may import a target and not use it."""
        self._make()
        self.register()

    def register(self) -> None:
        """Register this process's node with the run, once, where Ray is up."""
        if not self._registered:
            info = self.info
            found = nodes.register(info.id, info.directory, self.started_here, info.uid)
            self.hooks.node, self.hooks.ray = found
            self._registered = bool(self.hooks.node)

    def _make(self) -> None:
        if self._joined:
            return
        if files.exists(self.rundir.run_json):
            self._joined = True
            if self.started_here:
                self._resume()
            return
        said = previous_run.cut_off(self.rundir.path.with_name("latest"))
        self.rundir.make(self.rundir.path)
        layout.write_json(self.rundir.run_json, self.describe())
        self.rundir.point_latest()
        self._joined = True
        if said:
            log.warning(said)

    def _resume(self) -> None:
        """Note in `run.json` that the run goes on where an earlier attempt is over: a resumed run has the same id."""
        info = decoder.read(self.rundir.run_json, RunFile)
        own = (self.info.host, self.info.pid, self.info.ticks)
        if (info.host, info.pid, info.ticks) == own or runs.state(info, self.rundir.path) == "running":
            return
        said = previous_run.cut_off(self.rundir.path)
        self._earlier = previous_run.attempts(info, self.rundir.path)
        files.remove(str(self.rundir.exit_status))
        layout.write_json(self.rundir.run_json, self.describe())
        self.rundir.point_latest()
        if said:
            log.warning(said)

    def describe(self) -> dict[str, Any]:
        """Return the content of `run.json` as far as this process knows it."""
        known = RunFile(
            id=self.info.id,
            command=self.info.command,
            cwd=self.info.cwd,
            host=self.info.host,
            pid=self.info.pid,
            ticks=self.info.ticks,
            started=self.info.started,
            python=self.info.python,
            autoprof=__version__,
            settings=RunSettings(),
            hosts=[self.info.host],
            versions={},
            recipes=[],
            state="running",
            earlier=self._earlier,
            nodes=[RunNode(**node) for node in self.nodes],
        )
        said: dict[str, Any] = msgspec.to_builtins(known)
        return said | {"settings": hidden_in(self.settings.public())}

    def complete(self, no_hooks: str = "") -> None:
        """Summarise in `run.json` what the processes of the run left in `hooks/`, or why none of them had a hook."""
        # Another rank, or another program of this process, may have noted them.
        self._earlier = self._earlier or decoder.read(self.rundir.run_json, RunFile).earlier
        others = seat.own()
        error = "" if self.stopped else outcome.error() or (others.errors() if others is not None else "")
        known = {"ended": time.time(), "state": runs.FAILED if error else runs.ENDED}
        known |= {"error": error} if error else {}
        known |= self._deaths() if not self.stopped else {}
        known |= {"no_hooks": hidden(no_hooks)} if no_hooks else {}
        described = self.describe() | self.hooks.summary() | previous_run.note(self.rundir)
        layout.write_json(self.rundir.run_json, described | known)

    def _deaths(self) -> dict[str, Any]:
        """Return what `run.json` says of the exception that ends this process, and of processes that are dead now."""
        self.timeline.flush()
        exception = outcome.told()
        try:
            info = decoder.read(self.rundir.run_json, RunFile)
            died = deaths.find(self.rundir.path, info, over=False, own=exception)
        except Exception as error:  # files that somebody else is writing, or has removed
            interrupts.pass_on(error)
            died = []
        known = {"exception": exception, "died": died}
        return {name: msgspec.to_builtins(value) for name, value in known.items() if value}

    def leave_without_hooks(self, why: str) -> None:
        """Leave a directory that says why no hook was applied in any process of the run.

        Raises:
            OSError: It can't be written.
        """
        self._make()
        self.hooks.leave()
        self.complete(why)
        outcome.keep_status(self.rundir.exit_status)


class _State(process.State):
    """The run that this process is part of, and whether autoprof is off in it."""

    def begin(self) -> None:
        self.lock = threading.RLock()
        self.run: Runtime | None = None
        self.off = False

    def in_child(self) -> None:
        # The child has a file of its own in `hooks/`, and none of the locks that its parent's threads held.
        self.lock = threading.RLock()
        if self.run is not None:
            self.run.hooks.begin_anew()


_state = _State()


def current() -> Runtime | None:
    """Return the run that this process is part of, or None where autoprof is off or has not been needed yet."""
    return _state.run


def start(given: Mapping[str, object] | None = None, late: bool = False) -> Runtime | None:
    """Join the run: take the settings of the process that started it, or read them here and hand them on.

    Args:
        given: Settings that the program gives.
        late: The run is at its end, and another process may have said already what is wrong with its settings.

    Raises:
        SettingsError: One of those that the program gives is wrong. Without them autoprof is off then, which one line
            says.
    """
    with _state.lock:
        if _state.off or _state.run is not None:
            return _state.run
        if not _boot.enabled() or _boot.RUN_ID not in os.environ:
            _state.off = True
            return None
        began_here = _boot.RUN_INFO not in os.environ
        try:
            info = run_info.read(given, late)
        except SettingsError as error:
            if given is not None:
                raise
            _state.off = True
            _boot.switch_off(str(error))
            return None
        log.configure(info.settings.log)
        if began_here and identity.first() and not (late and files.is_folder(info.directory)):
            for line in (*sources.unknown(os.environ), *sources.unknown_roles(info.settings)):
                log.warning(line)
        _state.run = Runtime(info)
        return _state.run


def move(run_id: str, launch: str, rank: int) -> None:
    """Make this process, which has left nothing yet, one of the ranks of another run.

    Raises:
        SettingsError: The facts of the run are too long to be handed on.
    """
    with _state.lock:
        run = _state.run
        if run is None:
            return
        program = os.urandom(4).hex()
        taken = seat.take(run.settings, run_id, launch, program, rank)
        info = run_info.with_seat(run.info, taken) if taken is not None else run_info.named(run.info, run_id)
        run_info.hand_on(info)
        _state.run = Runtime(info)


def report(where: str, error: BaseException) -> None:
    """Count an error of autoprof's own and log it once. The error goes no further."""
    text, run = described(error), _state.run
    if run is not None and issubclass(type(error), OSError) and not files.is_folder(run.rundir.path):
        log.warning_once(run.rundir.unwritable(error))
    else:
        log.warning_once(f"{where}: {text}")
    if run is not None:
        run.hooks.error(where, text)


def switched_off(key: str, reason: str) -> None:
    """Report that a hook is disabled in this process from now on."""
    log.warning(f"{key}: {reason}")
    if _state.run is not None:
        _state.run.hooks.switched_off(key, reason)
