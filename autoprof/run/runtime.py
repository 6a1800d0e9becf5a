"""View of one process on its run: settings, run directory, hooks, timeline and errors of autoprof.

The process that starts a run passes the facts of the run to all others in the environment (`RunInfo`).
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from autoprof import __version__, _boot
from autoprof.base import files, identity, log, process, seam
from autoprof.base.exception_text import described
from autoprof.base.originals import os, threading, time
from autoprof.base.redact import hidden, hidden_in, redacted
from autoprof.config import settings, structs
from autoprof.config.parsers import MAX_NAME_BYTES
from autoprof.config.settings import Settings
from autoprof.config.values import GROUP, SettingsError
from autoprof.run import cluster, raised, seat, watcher
from autoprof.run.hook_log import HookLog
from autoprof.run.timeline import Timeline
from autoprof.rundir import deaths, decoder, layout, processes, runs
from autoprof.rundir.layout import RunDir
from autoprof.rundir.ranks import Seat
from autoprof.rundir.records import Attempt, Death, RunFile, RunNode, RunSettings


@structs.complete
class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of the run from the process that started it. All processes of the run have them."""

    id: str
    directory: str
    command: str
    cwd: str
    host: str
    pid: int
    started: float
    python: str
    settings: Settings
    # Start time of that process (`identity.start_ticks`), because pids are reused.
    ticks: int = 0
    # User id of that process. Ray's workers may run as another user: the user of the cluster.
    uid: int | None = None


# Number of characters of the command line, and of all facts together, that fit in the environment.
_MAX_COMMAND_CHARS = 1000
_MAX_INFO_CHARS = 64_000


def shortened(command: str) -> str:
    """Shorten a command line so that it fits in the environment.

    Linux allows 128 kB per variable, and often 2 MB for all variables and arguments (MAX_ARG_STRLEN and ARG_MAX).
    """
    cut = len(command) - _MAX_COMMAND_CHARS
    return command if cut <= 0 else f"{command[:_MAX_COMMAND_CHARS]}... ({cut} characters more)"


def read_info(given: Mapping[str, object] | None = None, late: bool = False) -> RunInfo:
    """Return the facts of the run: from the environment, or, in the process that starts the run, from the settings.

    The process that starts the run also writes the facts to the environment for its children.

    Args:
        given: Settings from the program. They replace settings from the environment.
        late: True at the end of the run. A rank that has not joined the run by then does not join it.

    Raises:
        SettingsError: The settings are wrong, or too long for the environment.
    """
    handed = os.environ.get(_boot.RUN_INFO)
    if handed:
        return msgspec.json.decode(handed, type=RunInfo)
    read = settings.load(os.environ, Path(_boot.started_in()), given)
    run_id = os.environ[_boot.RUN_ID]
    if run_id in (".", "..", "latest") or os.sep in run_id:
        raise SettingsError(f"{_boot.RUN_ID}: got {run_id[:80]!r}; it takes a folder's name other than 'latest'")
    if len(os.fsencode(run_id)) > MAX_NAME_BYTES:
        raise SettingsError(
            f"{_boot.RUN_ID}: got {run_id[:20]!r}...; it takes a folder's name, of {MAX_NAME_BYTES} bytes at most"
        )
    info = RunInfo(
        id=run_id,
        directory=os.path.join(read.dir, run_id),
        command=redacted(getattr(sys, "orig_argv", sys.argv)),
        cwd=os.getcwd(),
        host=identity.HOST,
        pid=os.getpid(),
        ticks=identity.start_ticks(os.getpid()) or 0,
        uid=os.geteuid(),
        started=time.time(),
        python=platform.python_version(),
        settings=read,
    )
    info = info if late else with_seat(info, seat.join_launch(read))
    hand_on(info)
    if read.recipes:
        # Children may have another working directory, so they get the settings file's recipes from the environment.
        os.environ[_boot.RECIPES] = os.pathsep.join(read.recipes)
        _boot.add_recipes()
    return info


def with_seat(info: RunInfo, taken: Seat | None) -> RunInfo:
    """Return the facts of the run that this rank has joined. The rank that joined first counts as its starter."""
    if taken is None:
        return info
    first = taken.first
    starter = {"host": first.host, "pid": first.pid, "ticks": first.ticks, "started": first.started}
    return msgspec.structs.replace(named_run(info, taken.run_id), **starter)


def named_run(info: RunInfo, run_id: str) -> RunInfo:
    """Return the facts with another run id and its directory."""
    return msgspec.structs.replace(info, id=run_id, directory=os.path.join(info.settings.dir, run_id))


def hand_on(info: RunInfo) -> None:
    """Write the facts of the run to the environment, for the processes that this one starts.

    Raises:
        SettingsError: The facts are too long, or are not UTF-8.
    """
    read = info.settings
    # The URL of the run's copy stays in this process, because it may contain a password.
    public = msgspec.structs.replace(read, collect="1" if read.collect else "")
    handed_on = msgspec.structs.replace(info, settings=public, command=shortened(info.command))
    try:
        text = msgspec.json.encode(handed_on).decode()
    except UnicodeEncodeError as error:
        seam.pass_on(error)
        raise SettingsError(
            f"{error.object[error.start - 20 if error.start > 20 else 0 : error.end + 20]!r} in the settings or the "
            "working directory is not UTF-8; autoprof needs names in UTF-8"
        ) from None
    if len(text) > _MAX_INFO_CHARS:
        raise SettingsError(
            f"the settings are {len(text)} characters long; at most {_MAX_INFO_CHARS} can be handed to the processes "
            "of a run; shorten the longest of them"
        )
    os.environ[_boot.RUN_ID], os.environ[_boot.RUN_INFO] = info.id, text


class Runtime:
    """One process of a run."""

    def __init__(self, info: RunInfo) -> None:
        self.info = info
        self.settings = info.settings
        self.rundir = RunDir(Path(info.directory))
        files.open_to_group(info.settings.access == GROUP)
        self.timeline = Timeline(
            self.rundir, self.restore, lambda: self.hooks.facts(), lambda whole: self.hooks.lines(whole)
        )
        self.hooks = HookLog(self.rundir, self.timeline, self._join, lambda: watcher.start(self))
        self._joined = self._completed = False
        self._registered = False
        # The nodes of the run that are known at its end.
        self.nodes: list[dict[str, Any]] = []
        # The attempts at this run before it was resumed.
        self._earlier: list[Attempt] = []
        # True if autoprof.stop() ends the run. The end of the process then does not change its state.
        self.stopped = False

    @property
    def started_here(self) -> bool:
        """Return True if this process started the run."""
        return self.info.host == identity.HOST and self.info.pid == os.getpid()

    @property
    def decides(self) -> bool:
        """Return True if this process answers requests. If several ranks run the trainer, only one answers."""
        return identity.own_rank() == 0 or (self.started_here and seat.own_seat() is None)

    @property
    def speaks(self) -> bool:
        """Return True if this process logs messages for the whole run: it started the run, or is its first rank."""
        if self.started_here:
            return True
        of_launcher = self.info.host == identity.HOST and self.info.pid == os.getppid() and "RANK" in os.environ
        return (of_launcher or seat.own_seat() is not None) and identity.own_rank() == 0

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
        own_seat = seat.own_seat()
        error = "" if self.stopped else raised.exception_type() or (own_seat.errors() if own_seat is not None else "")
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
            info = read_info(given, late)
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
        _state.run = Runtime(info)
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
        program = os.urandom(4).hex()
        taken = seat.take_seat(run.settings, run_id, launch, program, rank)
        info = with_seat(run.info, taken) if taken is not None else named_run(run.info, run_id)
        hand_on(info)
        _state.run = Runtime(info)


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
