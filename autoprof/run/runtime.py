"""One process's view of its run: settings, run directory, hooks, timeline and caught errors.

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
from autoprof.base import files, identity, interrupts, log, process
from autoprof.base.exception_text import described
from autoprof.base.originals import os, threading, time
from autoprof.base.redact import hidden, hidden_in, redacted
from autoprof.config import settings, structs
from autoprof.config.parsers import LONGEST_NAME
from autoprof.config.settings import Settings
from autoprof.config.values import GROUP, SettingsError
from autoprof.run import cluster, raised, seat, watcher
from autoprof.run.hook_log import HookLog
from autoprof.run.timeline import Timeline
from autoprof.rundir import deaths, decoder, layout, previous_run, runs
from autoprof.rundir.layout import RunDir
from autoprof.rundir.ranks import Seat
from autoprof.rundir.records import Attempt, RunFile, RunNode, RunSettings


@structs.complete
class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that the process that started the run knows."""

    id: str
    directory: str
    command: str
    cwd: str
    host: str
    pid: int
    started: float
    python: str
    settings: Settings
    # When the process began (`identity.began`): pids come again.
    ticks: int = 0
    # The user of the process. Ray's workers may run as the cluster's user.
    uid: int | None = None


# Characters of a command line in the environment, and of all that a process hands on there.
_MOST_COMMAND = 1000
_MOST_HANDED = 64_000


def shortened(command: str) -> str:
    """Shorten a command line to what fits in the environment.

    Linux allows 128 kB a variable, and often 2 MB in all with the arguments (MAX_ARG_STRLEN and ARG_MAX).
    """
    cut = len(command) - _MOST_COMMAND
    return command if cut <= 0 else f"{command[:_MOST_COMMAND]}... ({cut} characters more)"


def read_info(given: Mapping[str, object] | None = None, late: bool = False) -> RunInfo:
    """Read what was handed on, or the settings in the process that starts the run, which hands them on here.

    Args:
        given: Settings that the program gives, over those of the environment.
        late: The run is at its end: a rank that has not joined it leaves nothing.

    Raises:
        SettingsError: The settings are wrong, or too long to be handed on.
    """
    handed = os.environ.get(_boot.RUN_INFO)
    if handed:
        return msgspec.json.decode(handed, type=RunInfo)
    read = settings.load(os.environ, Path(_boot.started_in()), given)
    run_id = os.environ[_boot.RUN_ID]
    if run_id in (".", "..", "latest") or os.sep in run_id:
        raise SettingsError(f"{_boot.RUN_ID}: got {run_id[:80]!r}; it takes a folder's name other than 'latest'")
    if len(os.fsencode(run_id)) > LONGEST_NAME:
        raise SettingsError(
            f"{_boot.RUN_ID}: got {run_id[:20]!r}...; it takes a folder's name, of {LONGEST_NAME} bytes at most"
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
        # Makes the settings file's recipes known to the children too, in whatever directory they work.
        os.environ[_boot.RECIPES] = os.pathsep.join(read.recipes)
        _boot.add_recipes()
    return info


def with_seat(info: RunInfo, taken: Seat | None) -> RunInfo:
    """Return the facts of the run in which this rank has its place: the rank that joined first has started it."""
    if taken is None:
        return info
    first = taken.first
    whose = {"host": first.host, "pid": first.pid, "ticks": first.ticks, "started": first.started}
    return msgspec.structs.replace(named_run(info, taken.run_id), **whose)


def named_run(info: RunInfo, run_id: str) -> RunInfo:
    """Return the facts of a run that has this name."""
    return msgspec.structs.replace(info, id=run_id, directory=os.path.join(info.settings.dir, run_id))


def hand_on(info: RunInfo) -> None:
    """Hand the facts of the run to the processes that this one starts.

    Raises:
        SettingsError: They are too long.
    """
    read = info.settings
    # The URL of the run's copy stays in this process: it may hold a password.
    told = msgspec.structs.replace(read, collect="1" if read.collect else "")
    handed_on = msgspec.structs.replace(info, settings=told, command=shortened(info.command))
    try:
        text = msgspec.json.encode(handed_on).decode()
    except UnicodeEncodeError as error:
        interrupts.pass_on(error)
        raise SettingsError(
            f"{error.object[error.start - 20 if error.start > 20 else 0 : error.end + 20]!r} in the settings, or the "
            "working directory, is no UTF-8: autoprof takes names in UTF-8 alone"
        ) from None
    if len(text) > _MOST_HANDED:
        raise SettingsError(
            f"the settings are {len(text)} characters long, and no more than {_MOST_HANDED} can be handed to the "
            "processes of a run: shorten the longest of them"
        )
    os.environ[_boot.RUN_ID], os.environ[_boot.RUN_INFO] = info.id, text


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
        return identity.own_rank() == 0 or (self.started_here and seat.own_seat() is None)

    @property
    def speaks(self) -> bool:
        """Return whether this process speaks for the whole run: that which started it, or of ranks the first."""
        if self.started_here:
            return True
        of_launcher = self.info.host == identity.HOST and self.info.pid == os.getppid() and "RANK" in os.environ
        return (of_launcher or seat.own_seat() is not None) and identity.own_rank() == 0

    def _join(self) -> None:
        """Make the run directory with the first hook that is applied: a process may import a target and not use it."""
        self._make()
        self.register()

    def register(self) -> None:
        """Register this process's node with the run, once, where Ray is up."""
        if not self._registered:
            info = self.info
            found = cluster.register_node(info.id, info.directory, self.started_here, info.uid)
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
        others = seat.own_seat()
        error = "" if self.stopped else raised.exception_type() or (others.errors() if others is not None else "")
        known = {"ended": time.time(), "state": runs.FAILED if error else runs.ENDED}
        known |= {"error": error} if error else {}
        known |= self._deaths() if not self.stopped else {}
        known |= {"no_hooks": hidden(no_hooks)} if no_hooks else {}
        described = self.describe() | self.hooks.summary() | previous_run.note(self.rundir)
        layout.write_json(self.rundir.run_json, described | known)

    def _deaths(self) -> dict[str, Any]:
        """Return what `run.json` says of the exception that ends this process, and of processes that are dead now."""
        self.timeline.flush()
        exception = raised.uncaught()
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
        raised.keep_status(self.rundir.exit_status)


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
    """Make this process, which has left nothing yet, one of the ranks of another run.

    Raises:
        SettingsError: The facts of the run are too long to be handed on.
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
