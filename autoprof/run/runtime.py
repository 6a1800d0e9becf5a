"""This process as a part of its run: facts about the run, settings, hooks, timeline and errors of autoprof.

The process that starts the run passes the facts to its child processes in the environment. If a launcher started the
ranks, each rank takes its place in one common run.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from autoprof import __version__, _boot
from autoprof._boot import launch
from autoprof.base import files, identity, log, process, seam
from autoprof.base.originals import json, os, threading, time
from autoprof.base.redact import hidden, hidden_in, redacted
from autoprof.base.seam import described
from autoprof.config import settings, values
from autoprof.config.settings import Settings
from autoprof.config.values import GROUP, MAX_NAME_BYTES, SettingsError
from autoprof.run import cluster, raised, watcher
from autoprof.run.journal import HookLog, Timeline
from autoprof.rundir import deaths, layout, processes, ranks, runs
from autoprof.rundir.layout import RunDir
from autoprof.rundir.processes import EXITED, RUNNING, ProcessState
from autoprof.rundir.ranks import Seat
from autoprof.rundir.records import Attempt, Death, Raised, RunFile, RunNode, RunSettings


@values.thread_safe
class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about the run, from the process that started the run. All processes of the run have the same facts."""

    id: str
    directory: str
    command: str
    cwd: str
    host: str
    pid: int
    started: float
    python: str
    settings: Settings
    # Start time of the process that started the run (`identity.start_ticks`). Its pid may be reused.
    ticks: int = 0
    # User id of the process that started the run. Ray's workers may run as another user: the user of the cluster.
    uid: int | None = None


# Maximum number of characters of the command line, and of all facts in total. Linux allows 128 kB for one environment
# variable, and often 2 MB for all variables and arguments (MAX_ARG_STRLEN and ARG_MAX).
_MAX_COMMAND_CHARS = 1000
_MAX_INFO_CHARS = 64_000


def read_info(given: Mapping[str, object] | None = None, at_run_end: bool = False) -> tuple[RunInfo, Seat | None]:
    """Return the facts about the run, and the place of this process among the ranks of a launch.

    If the environment has the facts, they come from there. Otherwise this process starts the run: the facts come from
    the settings, and are written to the environment for child processes. Only a process that starts a run and that a
    launcher started as a rank has a place; otherwise the place is None.

    Args:
        given: Settings from the program. They replace settings from the environment.
        at_run_end: True at the end of the run. A rank that has not joined the run before does not join it at the end.

    Raises:
        SettingsError: The settings are wrong, or too long for the environment.
    """
    info_text = os.environ.get(_boot.RUN_INFO)
    if info_text:
        return msgspec.json.decode(info_text, type=RunInfo), None
    own_settings = settings.load(os.environ, Path(_boot.started_in()), given)
    run_id = os.environ[_boot.RUN_ID]
    if run_id in (".", "..", "latest") or os.sep in run_id:
        raise SettingsError(f"{_boot.RUN_ID}: got {run_id[:80]!r}; it takes a folder's name other than 'latest'")
    if len(os.fsencode(run_id)) > MAX_NAME_BYTES:
        raise SettingsError(
            f"{_boot.RUN_ID}: got {run_id[:20]!r}...; it takes a folder's name, of {MAX_NAME_BYTES} bytes at most"
        )
    info = RunInfo(
        id=run_id,
        directory=os.path.join(own_settings.dir, run_id),
        command=redacted(getattr(sys, "orig_argv", None) or getattr(sys, "argv", [])),
        cwd=os.getcwd(),
        host=identity.HOST,
        pid=os.getpid(),
        ticks=identity.start_ticks(os.getpid()) or 0,
        uid=os.geteuid(),
        started=time.time(),
        python=platform.python_version(),
        settings=own_settings,
    )
    seat = None
    # The module `_boot` has found the launch and has written these variables.
    name, _, program = os.environ.get(launch.LAUNCH, "").partition(":")
    rank = os.environ.get(launch.LAUNCH_RANK, "").partition("/")[0]
    if program and rank.isdecimal() and not at_run_end:
        chosen_id = os.environ.get(launch.LAUNCH_RUN_ID, "")
        info, seat = join_launch(info, "" if chosen_id == name else chosen_id, name, program, int(rank))
    hand_on(info)
    if own_settings.recipes:
        # Child processes may have another working directory and not find the settings file. So they get the recipes
        # from the environment.
        os.environ[_boot.RECIPES] = os.pathsep.join(own_settings.recipes)
        _boot.add_recipes()
    return info, seat


def join_launch(info: RunInfo, run_id: str, name: str, program: str, rank: int) -> tuple[RunInfo, Seat | None]:
    """Take the place of this process among the ranks of a launch.

    Args:
        info: The facts about the run that this process would start alone.
        run_id: The id of the run that the user chose, or an empty text.
        name: The name of the launch.
        program: The random id of the program that the launcher started.
        rank: The rank of this process.

    Returns:
        The facts about the common run of the ranks, and the place of this process. In these facts, the process that
        joined first is the process that started the run. If the folder of the runs can't be written, return `info` and
        None. The first applied hook then reports the problem.
    """
    own_settings = info.settings
    files.open_to_group(own_settings.access == GROUP)
    with seam.suppress(OSError):
        seat = ranks.join(
            Path(own_settings.dir), run_id, name, program, rank, name_may_repeat=name.startswith(launch.LAUNCH_AGAIN)
        )
        leader = seat.first
        starter = {"host": leader.host, "pid": leader.pid, "ticks": leader.ticks, "started": leader.started}
        return msgspec.structs.replace(with_id(info, seat.run_id), **starter), seat
    return info, None


def with_id(info: RunInfo, run_id: str) -> RunInfo:
    """Return the facts with another run id, and with the run directory of that id."""
    return msgspec.structs.replace(info, id=run_id, directory=os.path.join(info.settings.dir, run_id))


def hand_on(info: RunInfo) -> None:
    """Write the facts about the run to the environment, for the processes that this process starts.

    Raises:
        SettingsError: The facts are too long, or are not UTF-8.
    """
    own_settings = info.settings
    # The URL to which the run is copied stays in this process, because the URL may contain a password.
    public_settings = msgspec.structs.replace(own_settings, collect="1" if own_settings.collect else "")
    cut_chars = len(info.command) - _MAX_COMMAND_CHARS
    command = (
        info.command if cut_chars <= 0 else f"{info.command[:_MAX_COMMAND_CHARS]}... ({cut_chars} characters more)"
    )
    public_info = msgspec.structs.replace(info, settings=public_settings, command=command)
    try:
        text = msgspec.json.encode(public_info).decode()
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


# Fields of `run.json` that its first writer knows best.
_OF_START = ("command", "cwd", "started", "python", "settings")


class Runtime:
    """This process as a part of its run.

    Attributes:
        info: The facts about the run.
        seat: The place of this process among the ranks that a launcher started. None if no launcher started this
            process as a rank.
        settings: The settings of the run.
        rundir: The run directory.
        timeline: The timeline of this process.
        hooks: The log of the hooks of this process.
        began: The time at which autoprof started in this program, in seconds since the epoch. `os.exec` may have
            replaced an earlier program of the same process.
        nodes: The nodes of the run, as they are written to `run.json` at the end of the run.
        first_to_finish: True if this process runs `AUTOPROF_ON_FINISH`, False if another process does. None before the
            processes have agreed.
        stopped: True if `autoprof.stop()` ended the run. The end of the process then does not change the run's state.
    """

    def __init__(self, info: RunInfo, seat: Seat | None = None) -> None:
        self.info = info
        self.seat = seat
        self.settings = info.settings
        self.rundir = RunDir(Path(info.directory))
        files.open_to_group(info.settings.access == GROUP)
        self.timeline = Timeline(self.rundir, self.restore, lambda whole: self.hooks.head(whole))
        self.hooks = HookLog(self.rundir, self.timeline, self._join, lambda: watcher.start(self, self.hooks.fired))
        self._joined = self._completed = False
        self._registered = False
        # The earlier attempts, if this run was resumed.
        self._earlier: list[Attempt] = []
        self.began = time.time()
        self.nodes: list[RunNode] = []
        self.first_to_finish: bool | None = None
        self.stopped = False

    @property
    def started_here(self) -> bool:
        """Return True if this process started the run."""
        return self.info.host == identity.HOST and self.info.pid == os.getpid()

    @property
    def decides(self) -> bool:
        """Return True if this process answers triggers. If several ranks run the trainer, only one of them does."""
        return identity.own_rank() == 0 or (self.started_here and self.seat is None)

    @property
    def speaks(self) -> bool:
        """Return True if this process logs messages for the whole run.

        This is the process that started the run, or the first rank of a launcher.
        """
        if self.started_here:
            return True
        of_launcher = self.info.host == identity.HOST and self.info.pid == os.getppid() and "RANK" in os.environ
        return (of_launcher or self.seat is not None) and identity.own_rank() == 0

    def _join(self) -> None:
        """Make the run directory and register this node. Called when the first hook is applied.

        It is not called earlier, because a process may import a target without using it.
        """
        self._make()
        self.register()

    def register(self) -> None:
        """Register the node of this process with the run, if Ray is up and this was not done before."""
        if not self._registered:
            info = self.info
            node_and_address = cluster.register_node(info.id, info.directory, self.started_here, info.uid)
            self.hooks.node, self.hooks.ray = node_and_address
            self._registered = bool(self.hooks.node)

    def _make(self, keep_latest: bool = False) -> None:
        """Make the run directory and `run.json`. If this process resumes the run, write that into `run.json`.

        Args:
            keep_latest: True if `latest` must still point to an earlier run, if any.
        """
        if self._joined:
            return
        is_new = not files.exists(self.rundir.run_json)
        if is_new or (self.started_here and self._is_resumed()):
            warning = runs.killed(self.rundir.path.with_name("latest") if is_new else self.rundir.path)
            self.rundir.make(self.rundir.path)
            files.remove(str(self.rundir.exit_status))
            layout.write_json(self.rundir.run_json, self.describe())
            if not (keep_latest and files.exists(self.rundir.path.with_name("latest"))):
                self.rundir.point_latest()
            if warning:
                log.warning(warning)
        self._joined = True

    def launcher(self) -> int:
        """Return the pid of the running program that has started this one, also for the run, or else 0.

        That program has no hooks. It may start further programs, which belong to the same run, and it ends the run.
        """
        pid = _boot.starter()
        if pid in (None, os.getpid()) or self.seat is not None or self.info.host != identity.HOST:
            return 0
        return pid if pid is not None and identity.start_ticks(pid) is not None else 0

    def _is_resumed(self) -> bool:
        """Return True if an earlier attempt with the same run id has ended, and keep the attempts.

        Return False if the earlier attempt is running, or if this process itself wrote `run.json`.
        """
        info = layout.read_json(self.rundir.run_json, RunFile)
        own = (self.info.host, self.info.pid, self.info.ticks)
        state = runs.state(info, self.rundir.path)
        if (info.host, info.pid, info.ticks) == own or state == "running":
            return False
        last_attempt = Attempt(host=info.host, pid=info.pid, started=info.started, ended=info.ended, state=state)
        self._earlier = [*info.earlier, last_attempt]
        return True

    def describe(self, **result: Any) -> dict[str, Any]:
        """Return the fields of `run.json` that this process knows. The state is `running`, unless `result` has a state.

        Args:
            result: Fields of `RunFile` that are known at the end of the run.
        """
        info, launcher = self.info, self.launcher()
        record = RunFile(
            id=info.id,
            command=info.command,
            cwd=info.cwd,
            host=info.host,
            pid=launcher or info.pid,
            ticks=(identity.start_ticks(launcher) or 0) if launcher else info.ticks,
            started=info.started,
            python=info.python,
            autoprof=__version__,
            settings=RunSettings(),
            earlier=self._earlier,
            nodes=self.nodes,
            **({"hosts": [info.host], "versions": {}, "recipes": [], "state": "running"} | result),
        )
        fields: dict[str, Any] = msgspec.to_builtins(record)
        return fields | {"settings": hidden_in(self.settings.public())}

    def restore(self) -> None:
        """Write `run.json` again if the run directory was moved or removed. Never raises.

        Only the process that logs the messages for the whole run does so.
        """
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
        """Write the complete `run.json` at the end of the run, with a summary of all processes of the run.

        Args:
            no_hooks: The reason why no hook was applied in any process, or an empty text if a hook was applied.
        """
        # Another rank, an earlier program of this process, or a program that it started may have written these facts.
        written = layout.fields(self.rundir.run_json, RunFile)
        self._earlier = self._earlier or layout.record(written, RunFile).earlier
        known = {name: written[name] for name in _OF_START if name in written}
        self.timeline.flush()
        states = processes.read(self.rundir.path, all_spans=False)
        result: dict[str, Any] = {"ended": time.time(), "state": runs.ENDED, "no_hooks": hidden(no_hooks)}
        if not self.stopped:
            error = raised.exception_type() or (self.seat.errors() if self.seat is not None else "")
            exception = raised.uncaught()
            result |= {"error": error, "exception": exception, "died": self._deaths(states, exception)}
            result["state"] = runs.FAILED if error else runs.ENDED
        fields = self.describe(**processes.summary(states, self.hooks.versions), **result)
        layout.write_json(self.rundir.run_json, fields | known)
        self._completed = True

    def _deaths(self, states: Sequence[ProcessState], exception: Raised | None) -> list[Death]:
        """Return the deaths of processes of the run. `exception` is the exception that ends this process."""
        with seam.suppress(OSError):  # another process has removed the files
            info = layout.read_json(self.rundir.run_json, RunFile)
            named = exception.named if exception is not None else ()
            pids = {os.getpid(), *(process.pid for process in named)}
            ended = [state for state in states if state.pid in pids or _may_have_died(state)]
            return deaths.find(self.rundir.path, info, ended, run_has_ended=False, ending_exception=exception)
        return []

    def leave_without_hooks(self, why: str, keep_latest: bool) -> None:
        """Make a run directory and write the reason why no hook was applied in any process of the run.

        Args:
            why: The reason.
            keep_latest: True if `latest` must still point to an earlier run, if any.

        Raises:
            OSError: The directory can't be written.
        """
        self._make(keep_latest)
        self.hooks.leave()
        self.complete(why)
        raised.keep_status(self.rundir.exit_status)


class _RuntimeState(process.State):
    """The run that this process is part of. `off` is True if autoprof is switched off in this process."""

    def reset(self) -> None:
        self.lock = threading.RLock()
        self.run: Runtime | None = None
        self.off = False

    def after_fork_in_child(self) -> None:
        super().after_fork_in_child()
        if self.run is not None:
            self.run.seat = None
            self.run.hooks.begin_anew()


_state = _RuntimeState()


def _may_have_died(state: ProcessState) -> bool:
    """Return True unless the process is running or has exited without an exception.

    If an exception left a stage of such a process, the process has caught it.
    """
    return state.state != RUNNING and not (state.state == EXITED and not state.error)


def current() -> Runtime | None:
    """Return the run that this process is part of, or None if autoprof is off or has not started."""
    return _state.run


def start(given: Mapping[str, object] | None = None, at_run_end: bool = False) -> Runtime | None:
    """Join the run, or start a run if no process has started one. Return the run, or None if autoprof is off.

    A process that joins a run takes the settings from the process that started the run. A process that starts a run
    reads the settings and passes them to its child processes.

    Args:
        given: Settings from the program.
        at_run_end: True at the end of the run. If the run directory exists, another process has already warned about
            wrong settings.

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
            info, seat = read_info(given, at_run_end)
        except SettingsError as error:
            if given is not None:
                raise
            _state.off = True
            _boot.switch_off(str(error))
            return None
        log.configure(info.settings.log)
        if began_here and identity.first_rank() and not (at_run_end and files.is_folder(info.directory)):
            for line in (*settings.unknown(os.environ), *settings.unknown_roles(info.settings)):
                log.warning(line)
        _state.run = Runtime(info, seat)
        return _state.run


def move(run_id: str, launch: str, rank: int) -> None:
    """Make this process a rank of another run. This process must not have written any file before.

    Args:
        run_id: The id of the other run.
        launch: The name of the launch.
        rank: The rank of this process.

    Raises:
        SettingsError: The facts about the run are too long for the environment.
    """
    with _state.lock:
        run = _state.run
        if run is None:
            return
        info, seat = join_launch(with_id(run.info, run_id), run_id, launch, os.urandom(4).hex(), rank)
        hand_on(info)
        _state.run = Runtime(info, seat)


def report(where: str, error: BaseException) -> None:
    """Count an error of autoprof itself, and log the error once. The program does not get the error.

    Args:
        where: The part of autoprof that failed, such as a hook or `main`.
        error: The exception.
    """
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


# `autoprof recipes --try` sets this variable for the processes that it starts. Each of them then counts calls of hooks.
TRY_VARIABLE = "AUTOPROF_TRY"
# Folder with the counts: `calls/<host>-<pid>.<random>.txt`.
CALLS = "calls"
_COUNT_DIGITS = 15


class _CallCounts(process.State):
    """Counter of the calls of each hook in each step, for `autoprof recipes --try`.

    Each change of a count is written immediately, so that a killed process loses no count.

    Attributes:
        on: True if this process counts calls.
    """

    def reset(self) -> None:
        self.on = bool(os.environ.get(TRY_VARIABLE))
        self._forget()

    def after_fork_in_child(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._forget()

    def _forget(self) -> None:
        """Forget the file and the counts. The next count begins a new file."""
        # Reentrant: a signal handler may call a hooked function while a count is written.
        self._lock = threading.RLock()
        self._file = -1
        self._end = 0
        # Dict from hook, step and `fired` to the position in the file and the count.
        self._counts: dict[tuple[str, int | None, bool], list[int]] = {}

    def add(self, key: str, applies: bool) -> None:
        """Count a call of the function that the hook `key` hooks, in the current step.

        `applies` is true if the hook applies to this call, for example because the conditions of the hook are met.
        """
        run = current()
        if run is None:
            return
        try:
            with self._lock:
                count_key = key, cluster.known_step(), applies
                entry = self._counts.get(count_key)
                if entry is None:
                    entry = self._counts[count_key] = self._new(run.rundir, count_key)
                entry[1] += 1
                os.pwrite(self._file, b"%0*d" % (_COUNT_DIGITS, entry[1]), entry[0])
        except OSError as error:
            seam.pass_on(error)
            self.on = False

    def _new(self, directory: RunDir, count_key: tuple[str, int | None, bool]) -> list[int]:
        if self._file < 0:
            folder = directory.make(directory.path / CALLS)
            from autoprof.run import try_stacks  # no other run needs it

            try_stacks.sampler.start(folder)
            name = f"{identity.HOST}-{os.getpid()}.{os.urandom(4).hex()}.txt"
            self._file = files.create(folder / name, held=True)
        line = json.dumps(count_key).encode() + b" "
        offset = self._end + len(line)
        os.pwrite(self._file, line + b"0" * _COUNT_DIGITS + b"\n", self._end)
        self._end = offset + _COUNT_DIGITS + 1
        return [offset, 0]


call_counts = _CallCounts()
