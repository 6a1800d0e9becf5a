"""Runs that a script or a notebook starts and stops by itself: `autoprof.start(steps="+1")` and `autoprof.stop()`.

A run that is started so is like one of `AUTOPROF=1` in front of the command, from that moment on: the same variables
are set, for the processes that this one starts, and the same hooks are applied.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from autoprof import _boot
from autoprof._boot import command
from autoprof.base import files, identity, interrupts, log, process
from autoprof.base.originals import io, os, time
from autoprof.behaviours.script import blocks, opened
from autoprof.behaviours.trainer import running
from autoprof.capture import writer
from autoprof.config.settings import Settings
from autoprof.run import end, runtime, seat
from autoprof.run.runtime import Runtime
from autoprof.rundir import decoder
from autoprof.rundir.records import RunFile

# What `start` sets and `stop` sets back.
_VARIABLES = (
    _boot.ENABLE,
    _boot.RUN_ID,
    _boot.RUN_INFO,
    _boot.STARTER,
    _boot.RECIPES,
    command.LAUNCH_RANK,
    command.LAUNCH,
)
# How long a rank waits for the one that makes the run.
_RANK_0_S = 10.0
_PAUSE_S = 0.02


class _State(process.State):
    """The run that this process has started by itself.

    Attributes:
        before: The variables as they were before it; None where there is none.
        started: How many this process has started.
    """

    started = 0

    def begin(self) -> None:
        self.before: dict[str, str | None] | None = None

    def in_child(self) -> None:
        self.before = None


_state = _State()


def start(
    steps: str | int | None = None,
    *,
    contents: str | Sequence[str] | None = None,
    roles: str | Sequence[str] | None = None,
    ranks: str | int | None = None,
    tool: str | Sequence[str] | None = None,
    mode: str | None = None,
    when: str | Sequence[str] | None = None,
    dir: str | os.PathLike[str] | None = None,
    **settings: Any,
) -> Path | None:
    """Start a run in this process, which `stop` ends, or the end of the process.

    Call it before `ray.init()`. In a run that goes on by `AUTOPROF=1` its settings count, and this joins it.

    Args:
        steps: The steps to capture, as in `AUTOPROF_STEPS`: `"+1"` for the first, `"2,5"`, `"10:13"`, `"::50"`.
        contents: As in `AUTOPROF_CONTENTS`.
        roles: As in `AUTOPROF_ROLES`.
        ranks: As in `AUTOPROF_RANKS`.
        tool: As in `AUTOPROF_TOOL`.
        mode: As in `AUTOPROF_MODE`.
        when: As in `AUTOPROF_WHEN`.
        dir: The folder of the runs, as in `AUTOPROF_DIR`.
        **settings: The other settings, by their names in small letters.

    Returns:
        The run's folder; None where `AUTOPROF=0` in the environment switches autoprof off.

    Raises:
        SettingsError: A setting is wrong; a ValueError.
        RuntimeError: A run that this process has started goes on.
        OSError: The run's folder can't be made.
    """
    named = {"contents": contents, "roles": roles, "ranks": ranks, "tool": tool, "mode": mode, "when": when}
    folder = None if dir is None else os.fspath(dir)
    all_given = {"steps": steps, **named, "dir": folder, **settings}
    given = {name: value for name, value in all_given.items() if value is not None}
    if _state.before is not None:
        run = runtime.current()
        where = f", in {run.rundir.path}" if run is not None else ""
        raise RuntimeError(f"a run is going on{where}; autoprof.stop() ends it")
    if os.environ.get(_boot.ENABLE, "").strip() and not _boot.enabled():
        log.configure(Settings().log)
        log.warning_once(
            f"{_boot.ENABLE}={os.environ[_boot.ENABLE]} in the environment: autoprof.start() starts nothing"
        )
        return None
    if not _boot.enabled() or _boot.RUN_ID not in os.environ:
        return _begin(given).rundir.path
    run = opened.joined()
    if run is not None and given and (run.started_here or (identity.ranks() > 1 and not _follows())):
        what = ", ".join(given)
        log.warning_once(f"AUTOPROF=1 has started this run, and its settings count: autoprof.start() leaves out {what}")
    return run.rundir.path if run is not None else None


def stop() -> Path | None:
    """End the run that `start` has started, and wait until its files are complete.

    A run of `AUTOPROF=1` goes on: its step ends, and what was captured so far is waited for.

    Returns:
        The run's folder; None where there is no run.
    """
    run = opened.joined() if blocks.state.on else None
    if run is None:
        if _state.before is not None:  # autoprof was switched off meanwhile
            _set_back(_state.before)
        return None
    try:
        running.end_all("autoprof.stop() was called in it")
    except Exception as error:
        interrupts.pass_on(error)
        runtime.report("autoprof/stop", error)
    blocks.state.step = None
    opened.stop_blocks()
    if _state.before is None:
        settle(run)
        return run.rundir.path
    run.stopped = True
    # Where somebody interrupts it, the run's end is left to the next call, or to the end of the process.
    process.end()
    _set_back(_state.before)
    return run.rundir.path


def settle(run: Runtime) -> None:
    """Wait until what was captured so far is complete."""
    writer.wait(run.settings.stop_timeout_s)
    end.wait_for_files(run)


def _begin(given: dict[str, object]) -> Runtime:
    before = {name: os.environ.get(name) for name in _VARIABLES}
    process.reset()
    try:
        os.environ[_boot.ENABLE] = "1"
        os.environ.pop(_boot.RUN_INFO, None)
        if "WORLD_SIZE" not in os.environ:  # ranks of srun and mpirun; those of torchrun have a launcher on this host
            command.note_launch(os.environ, command.THIS, starts=True)
        os.environ.setdefault(_boot.RUN_ID, _new_id())
        # No process of it says at its end that no hook was applied.
        os.environ[_boot.STARTER] = f":{os.getcwd()}"
        run = runtime.start(given)
        assert run is not None
        if seat.own_seat() is None and _follows():
            _follow(run)
        try:
            run.rundir.make(run.rundir.path)
        except OSError as error:
            interrupts.pass_on(error)
            raise OSError(f"can't write to {run.rundir.path}: {error}") from None
        _boot.install()
        _boot.run_script(getattr(sys.modules["__main__"], "__file__", None) or "")
        _state.before = before
        blocks.state.begin()
        opened.joined()
    except BaseException:
        _set_back(before)
        raise
    _state.started += 1
    return run


def _set_back(before: dict[str, str | None]) -> None:
    """Leave this process as it was before the run."""
    _boot.uninstall()
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    process.reset()


def _new_id() -> str:
    """Return a new run id: the same in all ranks that a launcher such as torchrun has started on this host."""
    if identity.ranks() == 1:
        return _boot.new_run_id()
    launcher = os.getppid()
    ticks = identity.start_ticks(launcher) or 0
    with io.open("/proc/stat", opener=files.descriptor) as file:
        booted = next(int(line.split()[1]) for line in file if line.startswith("btime "))
    began = time.localtime(booted + ticks // os.sysconf("SC_CLK_TCK"))
    which = hashlib.sha256(f"{identity.machine()} {launcher} {ticks} {_state.started}".encode()).hexdigest()
    return f"{time.strftime('%Y%m%d-%H%M%S', began)}-{which[:6]}"


def _follows() -> bool:
    """Return whether another rank of this host makes the run."""
    local = os.environ.get("LOCAL_RANK") or os.environ.get("RANK") or "0"
    return identity.ranks() > 1 and local != "0"


def _follow(run: Runtime) -> None:
    """Leave the run to the first rank of this host, which ends it."""
    deadline = time.monotonic() + _RANK_0_S
    while not files.exists(run.rundir.run_json):
        if time.monotonic() > deadline:
            log.warning(f"rank 0 has not started the run {run.info.id} within {_RANK_0_S:g} s; this rank does")
            return
        time.sleep(_PAUSE_S)
    first = decoder.read(run.rundir.run_json, RunFile)
    whose = {"host": first.host, "pid": first.pid, "ticks": first.ticks, "started": first.started}
    run.info = msgspec.structs.replace(run.info, **whose)
