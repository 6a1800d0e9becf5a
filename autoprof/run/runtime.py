"""View of one process on its run: settings, run directory, hooks, timeline and errors of autoprof."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from autoprof import __version__, _boot
from autoprof.base import files, identity, log, process, seam
from autoprof.base.exception_text import described
from autoprof.base.originals import os, threading, time
from autoprof.base.redact import hidden, hidden_in
from autoprof.config import settings
from autoprof.config.values import GROUP, SettingsError
from autoprof.run import cluster, raised, watcher
from autoprof.run.hook_log import HookLog
from autoprof.run.info import RunInfo, hand_on, join_launch, read_info, with_id
from autoprof.run.timeline import Timeline
from autoprof.rundir import deaths, decoder, layout, processes, runs
from autoprof.rundir.layout import RunDir
from autoprof.rundir.ranks import Seat
from autoprof.rundir.records import Attempt, Death, RunFile, RunNode, RunSettings


class Runtime:
    """One process of a run.

    Attributes:
        info: The facts of the run.
        seat: The place of this process among the ranks that a launcher started. None without a launcher, and in
            children of a rank.
        began: The start, in seconds since the epoch. `os.exec` may have replaced an earlier program of this process.
        nodes: The nodes of the run that are known at its end.
        first_to_finish: True if this process runs `AUTOPROF_ON_FINISH`; None until it has asked the other nodes.
        stopped: True if `autoprof.stop()` ends the run. The end of the process then does not change its state.
    """

    def __init__(self, info: RunInfo, seat: Seat | None = None) -> None:
        self.info = info
        self.seat = seat
        self.settings = info.settings
        self.rundir = RunDir(Path(info.directory))
        files.open_to_group(info.settings.access == GROUP)
        self.timeline = Timeline(
            self.rundir, self.restore, lambda: self.hooks.facts(), lambda whole: self.hooks.lines(whole)
        )
        self.hooks = HookLog(self.rundir, self.timeline, self._join, lambda: watcher.start(self))
        self._joined = self._completed = False
        self._registered = False
        # The attempts at this run before it was resumed.
        self._earlier: list[Attempt] = []
        self.began = time.time()
        self.nodes: list[dict[str, Any]] = []
        self.first_to_finish: bool | None = None
        self.stopped = False

    @property
    def started_here(self) -> bool:
        """Return True if this process started the run."""
        return self.info.host == identity.HOST and self.info.pid == os.getpid()

    @property
    def decides(self) -> bool:
        """Return True if this process answers requests. If several ranks run the trainer, only one answers."""
        return identity.own_rank() == 0 or (self.started_here and self.seat is None)

    @property
    def speaks(self) -> bool:
        """Return True if this process logs messages for the whole run: it started the run, or is its first rank."""
        if self.started_here:
            return True
        of_launcher = self.info.host == identity.HOST and self.info.pid == os.getppid() and "RANK" in os.environ
        return (of_launcher or self.seat is not None) and identity.own_rank() == 0

    def _join(self) -> None:
        """Make the run directory when the first hook is applied. A process may import a target without using it."""
        self._make()
        self.register()

    def register(self) -> None:
        """Register this process's node with the run, once, if Ray is up."""
        if not self._registered:
            info = self.info
            node_and_address = cluster.register_node(info.id, info.directory, self.started_here, info.uid)
            self.hooks.node, self.hooks.ray = node_and_address
            self._registered = bool(self.hooks.node)

    def _make(self) -> None:
        if self._joined:
            return
        if files.exists(self.rundir.run_json):
            self._joined = True
            if self.started_here:
                self._resume()
            return
        warning = runs.killed(self.rundir.path.with_name("latest"))
        self.rundir.make(self.rundir.path)
        layout.write_json(self.rundir.run_json, self.describe())
        self.rundir.point_latest()
        self._joined = True
        if warning:
            log.warning(warning)

    def _resume(self) -> None:
        """Write in `run.json` that this process resumes the run, if an earlier attempt with the same id is over."""
        info = decoder.read(self.rundir.run_json, RunFile)
        own = (self.info.host, self.info.pid, self.info.ticks)
        state = runs.state(info, self.rundir.path)
        if (info.host, info.pid, info.ticks) == own or state == "running":
            return
        warning = runs.killed(self.rundir.path)
        last = Attempt(host=info.host, pid=info.pid, started=info.started, ended=info.ended, state=state)
        self._earlier = [*info.earlier, last]
        files.remove(str(self.rundir.exit_status))
        layout.write_json(self.rundir.run_json, self.describe())
        self.rundir.point_latest()
        if warning:
            log.warning(warning)

    def describe(self) -> dict[str, Any]:
        """Return the content of `run.json` that this process knows."""
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
        fields: dict[str, Any] = msgspec.to_builtins(known)
        return fields | {"settings": hidden_in(self.settings.public())}

    def restore(self) -> None:
        """Write this process's files again if the run's folder was moved or removed. Never raises."""
        if not self._joined or self._completed:
            return
        try:
            if self.speaks and not files.exists(self.rundir.run_json):
                log.warning_once(
                    f"{self.rundir.path} was moved or removed; autoprof makes it again, and records there from now on"
                )
                layout.write_json(self.rundir.run_json, self.describe())
        except OSError as error:
            seam.pass_on(error)
            self.rundir.report("run.json", error)

    def complete(self, no_hooks: str = "") -> None:
        """Complete `run.json` at the end of the run, with a summary of its processes, or why no hook was applied."""
        # Another rank, or an earlier program of this process, may have written the attempts.
        self._earlier = self._earlier or decoder.read(self.rundir.run_json, RunFile).earlier
        error = raised.exception_type() or (self.seat.errors() if self.seat is not None else "")
        error = "" if self.stopped else error
        known = {"ended": time.time(), "state": runs.FAILED if error else runs.ENDED}
        known |= {"error": error} if error else {}
        known |= self._deaths() if not self.stopped else {}
        known |= {"no_hooks": hidden(no_hooks)} if no_hooks else {}
        summary = processes.summary(self.rundir, self.hooks.versions)
        layout.write_json(self.rundir.run_json, self.describe() | summary | known)
        self._completed = True

    def _deaths(self) -> dict[str, Any]:
        """Return the fields of `run.json` for the exception that ends this process, and for the dead processes."""
        self.timeline.flush()
        exception = raised.uncaught()
        died: list[Death] = []
        with seam.suppress(OSError):  # another process has removed the files
            info = decoder.read(self.rundir.run_json, RunFile)
            died = deaths.find(self.rundir.path, info, over=False, own=exception)
        known = {"exception": exception, "died": died}
        return {name: msgspec.to_builtins(value) for name, value in known.items() if value}

    def leave_without_hooks(self, why: str) -> None:
        """Write a run directory that gives the reason why no hook was applied in any process of the run.

        Raises:
            OSError: The directory can't be written.
        """
        self._make()
        self.hooks.leave()
        self.complete(why)
        raised.keep_status(self.rundir.exit_status)


class _RuntimeState(process.State):
    """The run that this process is part of, and whether autoprof is off in it."""

    def begin(self) -> None:
        self.lock = threading.RLock()
        self.run: Runtime | None = None
        self.off = False

    def in_child(self) -> None:
        super().in_child()
        if self.run is not None:
            self.run.seat = None
            self.run.hooks.begin_anew()


_state = _RuntimeState()


def current() -> Runtime | None:
    """Return the run that this process is part of, or None if autoprof is off or has not started."""
    return _state.run


def start(given: Mapping[str, object] | None = None, late: bool = False) -> Runtime | None:
    """Join the run: take the settings of the process that started it, or read them and hand them on.

    Args:
        given: Settings from the program.
        late: True at the end of the run. Another process may have warned about its settings already.

    Raises:
        SettingsError: A setting from the program is wrong. If a setting from the environment is wrong, autoprof
            switches itself off and logs one line instead.
    """
    with _state.lock:
        if _state.off or _state.run is not None:
            return _state.run
        if not _boot.enabled() or _boot.RUN_ID not in os.environ:
            _state.off = True
            return None
        began_here = _boot.RUN_INFO not in os.environ
        try:
            info, seat = read_info(given, late)
        except SettingsError as error:
            if given is not None:
                raise
            _state.off = True
            _boot.switch_off(str(error))
            return None
        log.configure(info.settings.log)
        if began_here and identity.first_rank() and not (late and files.is_folder(info.directory)):
            for line in (*settings.unknown(os.environ), *settings.unknown_roles(info.settings)):
                log.warning(line)
        _state.run = Runtime(info, seat)
        return _state.run


def move(run_id: str, launch: str, rank: int) -> None:
    """Make this process a rank of another run. It must not have written any file yet.

    Raises:
        SettingsError: The facts of the run are too long for the environment.
    """
    with _state.lock:
        run = _state.run
        if run is None:
            return
        info, seat = join_launch(with_id(run.info, run_id), run_id, launch, os.urandom(4).hex(), rank)
        hand_on(info)
        _state.run = Runtime(info, seat)


def report(where: str, error: BaseException) -> None:
    """Count an error of autoprof itself, and log it once. The program does not see the error."""
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
