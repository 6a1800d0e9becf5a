"""What a process knows of its run: the settings, the run directory, its hooks, the errors that were caught."""

from __future__ import annotations

import os
import platform
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from autoprof import __version__, _boot, _files, before, gates, listing, log, nodes, rundir, settings
from autoprof.documents import RunDocument
from autoprof.hooklog import HookLog
from autoprof.recipe import RecipeError
from autoprof.redaction import hidden_in, redacted
from autoprof.rundir import RunDir
from autoprof.settings import Settings, SettingsError
from autoprof.timeline import Timeline

if TYPE_CHECKING:
    from autoprof.telling import Teller


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the process that started the run hands to all others, in the environment."""

    id: str
    directory: str
    command: str
    cwd: str
    host: str
    pid: int
    started: float
    python: str
    settings: Settings
    # When the process began (`rundir.began`): pids come again.
    ticks: int = 0


class Runtime:
    """One process of a run."""

    def __init__(self, info: RunInfo) -> None:
        self.info = info
        self.settings = info.settings
        self.rundir = RunDir(Path(info.directory))
        _files.open_to_group(info.settings.access == settings.GROUP)
        self.hooks = HookLog(self.rundir, self._join)
        self.timeline = Timeline(self.rundir)
        # What this process has to tell others of itself, where a setting asks for that.
        self.teller: Teller | None = None
        self._joined = False
        self._registered = False
        # The nodes that the run worked on, as far as it is known when it ends.
        self.nodes: list[dict[str, Any]] = []
        # The attempts at this run before it was resumed.
        self._earlier: list[dict[str, Any]] = []

    @property
    def started_here(self) -> bool:
        """Whether this process is the one that started the run."""
        return self.info.host == rundir.HOST and self.info.pid == os.getpid()

    def _join(self) -> None:
        """Make the run directory with the first hook that is applied: a process may import a target for nothing."""
        self._make()
        self.register()

    def register(self) -> None:
        """Say, once and where Ray is up, that this process's node works on the run."""
        if not self._registered:
            self.hooks.node = nodes.register(self.info.id, self.info.directory, self.started_here)
            self._registered = bool(self.hooks.node)

    def _make(self) -> None:
        if self._joined:
            return
        if os.path.exists(self.rundir.run_json):
            self._joined = True
            if self.started_here:
                self._resume()
            return
        said = before.cut_off(self.rundir.path.with_name("latest"))
        rundir.write_json(self.rundir.make(self.rundir.path) / "run.json", self.describe())
        self.rundir.point_latest()
        self._joined = True
        if said:
            log.warning(said)

    def _resume(self) -> None:
        """Say in `run.json` that the run goes on where an earlier attempt at it is over: a resumed run has its id."""
        info = listing.load_json(self.rundir.run_json, RunDocument)
        own = (self.info.host, self.info.pid, self.info.ticks)
        if (info.get("host"), info.get("pid"), info.get("ticks")) == own or listing.state(info) == "running":
            return
        said = before.cut_off(self.rundir.path)
        self._earlier = before.attempts(info)
        rundir.write_json(self.rundir.run_json, self.describe())
        self.rundir.point_latest()
        if said:
            log.warning(said)

    def describe(self) -> dict[str, Any]:
        """The content of `run.json` as far as this process knows it."""
        return {
            "id": self.info.id,
            "command": self.info.command,
            "cwd": self.info.cwd,
            "host": self.info.host,
            "pid": self.info.pid,
            "ticks": self.info.ticks,
            "started": self.info.started,
            "python": self.info.python,
            "autoprof": __version__,
            "settings": hidden_in(self.settings.public()),
            "hosts": [self.info.host],
            "versions": {},
            "recipes": [],
            "state": "running",
            **({"earlier": self._earlier} if self._earlier else {}),
            **({"nodes": self.nodes} if self.nodes else {}),
        }

    def complete(self) -> None:
        """Bring together in `run.json` what the processes of the run left in `hooks/`."""
        described = self.describe() | self.hooks.summary() | before.note(self.rundir)
        rundir.write_json(self.rundir.run_json, described | {"ended": time.time(), "state": "ended"})


# Characters of a command line in the environment, and of all that a process hands on there.
_MOST_COMMAND = 1000
_MOST_HANDED = 64_000

_lock = threading.RLock()
_runtime: Runtime | None = None
_off = False


def _in_child() -> None:
    """A forked child has a file of its own in `hooks/`, and none of the locks that its parent's threads held."""
    global _lock
    _lock = threading.RLock()
    if _runtime is not None:
        _runtime.hooks.begin_anew()


os.register_at_fork(after_in_child=_in_child)


def current() -> Runtime | None:
    """The run that this process is part of, or None where autoprof is off or has not been needed yet."""
    return None if _off else _runtime


def start() -> Runtime | None:
    """Join the run: the settings come from the process that started it, or are read here and handed on."""
    global _runtime, _off
    with _lock:
        if _off or _runtime is not None:
            return current()
        if not _boot.enabled() or _boot.RUN_ID not in os.environ:
            _off = True
            return None
        try:
            info = _read_info()
        except SettingsError as error:
            _off = True
            _boot.switch_off(str(error))
            return None
        log.configure(info.settings.log)
        _runtime = Runtime(info)
        return _runtime


def report(where: str, error: BaseException) -> None:
    """Count an error of autoprof's own and say it once. It goes no further."""
    text = str(error) if isinstance(error, RecipeError) else f"{type(error).__name__}: {error}"
    # Every process of a run reads the same recipes; what is wrong with one is said where the run was started.
    if _runtime is not None and isinstance(error, OSError) and not os.path.isdir(_runtime.rundir.path):
        log.warning_once(_runtime.rundir.unwritable(error))
    elif not isinstance(error, RecipeError):
        log.warning_once(f"{where}: {text}")
    elif _runtime is None or _runtime.started_here:
        log.warning_once(f"{text}; this recipe is left out")
    if _runtime is not None:
        _runtime.hooks.error(where, text)


def switched_off(key: str) -> None:
    """Say that a hook is left alone in this process from now on."""
    reason = f"it failed {gates.FAILURES} times in a row and is switched off in this process"
    log.warning(f"{key}: {reason}")
    if _runtime is not None:
        _runtime.hooks.switched_off(key, reason)


def shortened(command: str) -> str:
    """Shorten a command line to what may stand in the environment, of which the system allows 128 kB a variable, and
    often 2 MB with the arguments of what is started (Linux, MAX_ARG_STRLEN and ARG_MAX)."""
    cut = len(command) - _MOST_COMMAND
    return command if cut <= 0 else f"{command[:_MOST_COMMAND]}... ({cut} characters more)"


def _read_info() -> RunInfo:
    handed = os.environ.get(_boot.RUN_INFO)
    if handed:
        return msgspec.json.decode(handed, type=RunInfo)
    cwd = Path.cwd()
    read = settings.load(os.environ, cwd)
    run_id = os.environ[_boot.RUN_ID]
    info = RunInfo(
        id=run_id,
        directory=os.path.join(read.dir, run_id),
        command=redacted(getattr(sys, "orig_argv", sys.argv)),
        cwd=str(cwd),
        host=rundir.HOST,
        pid=os.getpid(),
        ticks=rundir.began(os.getpid()) or 0,
        started=time.time(),
        python=platform.python_version(),
        settings=read,
    )
    # Where the run is copied to is this process's own affair, and may hold a password.
    told = msgspec.structs.replace(read, collect="1" if read.collect else "")
    handed_on = msgspec.structs.replace(info, settings=told, command=shortened(info.command))
    text = msgspec.json.encode(handed_on).decode()
    if len(text) > _MOST_HANDED:
        raise SettingsError(
            f"the settings are {len(text)} characters long, and no more than {_MOST_HANDED} can be handed to the "
            "processes of a run: shorten the lists of recipes, roles or conditions"
        )
    os.environ[_boot.RUN_INFO] = text
    if read.recipes:
        # Those that the settings file names are known from here on, in the children too and wherever they work.
        os.environ["AUTOPROF_RECIPES"] = os.pathsep.join(read.recipes)
        for finder in sys.meta_path:
            if isinstance(finder, _boot.Finder):
                finder.add(_boot.recipe_files())
    return info
