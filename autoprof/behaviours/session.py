"""Runs that a script or a notebook starts and stops itself: `autoprof.start(steps="+1")` and `autoprof.stop()`.

From its start, such a run is like a run whose command is started with `AUTOPROF=1`. `start` sets the same environment
variables for child processes and applies the same hooks.

In a notebook, `%load_ext autoprof` loads the magic `%%autoprof`, which records one cell as one step, in one such run.
"""

from __future__ import annotations

import hashlib
import sys
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from autoprof import _boot
from autoprof._boot import launch
from autoprof.base import files, identity, log, process, seam, units
from autoprof.base.originals import io, os, subprocess, time
from autoprof.behaviours import blocks, opened, stages, steps
from autoprof.capture import writer
from autoprof.config.settings import Settings
from autoprof.config.values import SettingsError
from autoprof.run import end, runtime
from autoprof.rundir import file_names, layout, runs
from autoprof.rundir.layout import RunDir
from autoprof.rundir.records import RunFile

# Variables that `start` sets and `stop` restores.
_VARIABLES = (
    _boot.ENABLE,
    _boot.RUN_ID,
    _boot.RUN_INFO,
    _boot.STARTER,
    _boot.RECIPES,
    launch.LAUNCH_RANK,
    launch.LAUNCH,
)
# Seconds that a rank waits until rank 0 of its host has created the run.
RANK_0_TIMEOUT_S = 10.0
# Seconds between two checks whether rank 0 has created the run.
POLL_INTERVAL_S = 0.02


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
    """Start a run in this process. `stop`, or the end of the process, ends the run.

    Call `start` before `ray.init()`. If the command was started with `AUTOPROF=1`, a run is already active. Then
    `start` joins this run and does not change its settings.

    Args:
        steps: Steps to capture, as in `AUTOPROF_STEPS`: `"+1"` (the first step), `"2,5"`, `"10:13"`, `"::50"`.
        contents: Contents of traces, as in `AUTOPROF_CONTENTS`.
        roles: Roles to capture, as in `AUTOPROF_ROLES`.
        ranks: Ranks to capture, as in `AUTOPROF_RANKS`.
        tool: Tools in order of preference, as in `AUTOPROF_TOOL`.
        mode: Mode of captures, as in `AUTOPROF_MODE`.
        when: Conditions that open windows, as in `AUTOPROF_WHEN`.
        dir: Folder of the runs, as in `AUTOPROF_DIR`.
        **settings: Other settings. The keyword is the name of the setting in lower case, without `AUTOPROF_`.

    Returns:
        The run's folder, or None if `AUTOPROF=0` in the environment switches autoprof off.

    Raises:
        SettingsError: A setting is invalid. The class is a subclass of ValueError.
        RuntimeError: This process has already started a run that is still active.
        OSError: The run's folder can't be created.
    """
    named_settings = {"contents": contents, "roles": roles, "ranks": ranks, "tool": tool, "mode": mode, "when": when}
    folder = None if dir is None else os.fspath(dir)
    arguments = {"steps": steps, **named_settings, "dir": folder, **settings}
    run_settings = {name: value for name, value in arguments.items() if value is not None}
    if blocks.state.before is not None:
        run = runtime.current()
        folder = f", in {run.rundir.path}" if run is not None else ""
        raise RuntimeError(f"a run is already active{folder}; autoprof.stop() ends it")
    if os.environ.get(_boot.ENABLE, "").strip() and not _boot.enabled():
        log.configure(Settings().log)
        log.warning_once(
            f"{_boot.ENABLE}={os.environ[_boot.ENABLE]} in the environment: autoprof.start() starts nothing"
        )
        return None
    if not _boot.enabled() or _boot.RUN_ID not in os.environ:
        return _begin(run_settings).rundir.path
    run = opened.joined()
    if run is not None and run_settings and (run.started_here or (identity.ranks() > 1 and not _joins_rank_0())):
        ignored = ", ".join(run_settings)
        log.warning_once(f"AUTOPROF=1 started this run, which keeps its settings: autoprof.start() ignores {ignored}")
    return run.rundir.path if run is not None else None


def stop() -> Path | None:
    """End the run that `start` started, and wait until the run's files are complete.

    If `AUTOPROF=1` started the run, the run continues after this call. `stop` then ends only the open step, and waits
    until the files of the captures are complete.

    Returns:
        The run's folder, or None if no run is active.
    """
    run = opened.joined() if blocks.state.on else None
    if run is None:
        if blocks.state.before is not None:  # autoprof was disabled after `start`
            _restore(blocks.state.before)
        return None
    with seam.guard("autoprof/stop", runtime.report):
        stages.abort_all("autoprof.stop() was called during the stage")
    blocks.state.step = None
    opened.stop_blocks()
    if blocks.state.before is None:
        settle(run)
        return run.rundir.path
    run.stopped = True
    # If `process.run_exit_functions` is interrupted, the next call of `stop`, or the end of the process, ends the run.
    process.run_exit_functions()
    _restore(blocks.state.before)
    return run.rundir.path


def settle(run: runtime.Runtime) -> None:
    """Wait until the files of all captures that have ended are complete."""
    writer.wait(run.settings.stop_timeout_s)
    end.wait_for_files(run)


def _begin(run_settings: dict[str, object]) -> runtime.Runtime:
    earlier_variables = {name: os.environ.get(name) for name in _VARIABLES}
    process.reset()
    try:
        os.environ[_boot.ENABLE] = "1"
        os.environ.pop(_boot.RUN_INFO, None)
        # Ranks of srun and mpirun have no WORLD_SIZE. Ranks of torchrun have one launcher process on this host.
        if "WORLD_SIZE" not in os.environ:
            launch.note_launch(os.environ, _boot.COMMAND, starts=True)
        os.environ.setdefault(_boot.RUN_ID, _new_id())
        # This value prevents the processes of the run from warning at their ends that no hook was applied.
        os.environ[_boot.STARTER] = f":{os.getcwd()}"
        run = runtime.start(run_settings)
        assert run is not None
        if run.seat is None and _joins_rank_0():
            _join_rank_0(run)
        try:
            run.rundir.make(run.rundir.path)
        except OSError as error:
            seam.pass_on(error)
            raise OSError(f"can't write to {run.rundir.path}: {error}") from None
        _boot.install()
        _boot.run_script(getattr(sys.modules["__main__"], "__file__", None) or "")
        blocks.state.reset()
        opened.joined()
        blocks.state.before = earlier_variables
    finally:
        if blocks.state.before is not earlier_variables:
            _restore(earlier_variables)
    blocks.state.started += 1
    return run


def _restore(earlier_variables: dict[str, str | None]) -> None:
    """Restore the environment variables and the state that this process had before the run.

    Args:
        earlier_variables: Dict from the name of each variable to its value before the run, or to None if the variable
            was not set.
    """
    _boot.uninstall()
    for name, value in earlier_variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    process.reset()


def _new_id() -> str:
    """Return a new run id.

    All ranks that one launcher, such as torchrun, has started on this host get the same run id. So the id is derived
    from the launcher's process and start time.
    """
    if identity.ranks() == 1:
        return _boot.new_run_id()
    launcher = os.getppid()
    ticks = identity.start_ticks(launcher) or 0
    with io.open("/proc/stat", opener=files.descriptor) as file:
        boot_time_s = next(int(line.split()[1]) for line in file if line.startswith("btime "))
    launch_time = time.localtime(boot_time_s + ticks // os.sysconf("SC_CLK_TCK"))
    digest = hashlib.sha256(f"{identity.machine()} {launcher} {ticks} {blocks.state.started}".encode()).hexdigest()
    return f"{time.strftime('%Y%m%d-%H%M%S', launch_time)}-{digest[:6]}"


def _joins_rank_0() -> bool:
    """Return True if rank 0 of this host creates the run, and this rank must join the run."""
    local_rank = os.environ.get("LOCAL_RANK") or os.environ.get("RANK") or "0"
    return identity.ranks() > 1 and local_rank != "0"


def _join_rank_0(run: runtime.Runtime) -> None:
    """Wait until rank 0 of this host has created the run, and take over the run's owner: rank 0 also ends the run.

    If rank 0 does not create the run within RANK_0_TIMEOUT_S, log a warning.
    """
    deadline = time.monotonic() + RANK_0_TIMEOUT_S
    while not files.exists(run.rundir.run_json):
        if time.monotonic() > deadline:
            log.warning(
                f"rank 0 has not started the run {run.info.id} within {RANK_0_TIMEOUT_S:g} s; this rank starts it"
            )
            return
        time.sleep(POLL_INTERVAL_S)
    run_file = layout.read_json(run.rundir.run_json, RunFile)
    owner = {"host": run_file.host, "pid": run_file.pid, "ticks": run_file.ticks, "started": run_file.started}
    run.info = msgspec.structs.replace(run.info, **owner)


_ROLE, _STAGE = "notebook", "cell"
USAGE = "%%autoprof [--contents cpu,shapes] [--SETTING VALUE ...] [--open]"
# Beginning of the output line that `autoprof open` prints last, before it begins to serve.
SERVING_MARK = "Ctrl-C"


def load_ipython_extension(shell: Any) -> None:
    """Register the magic `%%autoprof` in IPython."""

    def autoprof(line: str, cell: str) -> None:
        """Run the cell as one step and record it: %%autoprof [--contents cpu,shapes] [--SETTING VALUE ...] [--open]."""
        try:
            open_page, settings = _options(line)
            print(*_recorded(shell, cell, settings, open_page), sep="\n")
        except (SettingsError, OSError) as error:
            seam.pass_on(error)
            from IPython.core.error import UsageError

            raise UsageError(f"%%autoprof: {error}") from None

    shell.register_magic_function(autoprof, magic_kind="cell")
    weakref.finalize(shell, _close)


def _options(line: str) -> tuple[bool, dict[str, str]]:
    """Parse the arguments of `%%autoprof`.

    Returns:
        True if the arguments contain `--open`, and a dict from the name of each setting to its value.

    Raises:
        SettingsError: The arguments do not have the form of `USAGE`, or they set `steps`.
    """
    import shlex

    words = shlex.split(line, comments=True)
    settings: dict[str, str] = {}
    open_page = False
    while words:
        word = words.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if word == "--open":
            open_page = True
        elif word.startswith("--") and name and (equals or words):
            settings[name.replace("-", "_")] = value if equals else words.pop(0)
        else:
            raise SettingsError(f"got {word!r}; use {USAGE}")
    if "steps" in settings:
        raise SettingsError("--steps: the cell is one step and is always captured; leave --steps out")
    return open_page, settings


def _recorded(shell: Any, cell: str, settings: dict[str, str], open_page: bool) -> Iterator[str]:
    """Run a cell as one step of the active run, or of a new run. Yield output lines that say where the trace is.

    Args:
        shell: IPython's shell.
        cell: Code of the cell.
        settings: Settings of the new run.
        open_page: True to serve the run's page after the cell.
    """
    run_active = blocks.state.on
    if run_active and settings:
        raise SettingsError(
            f"a run is already active and keeps its settings; leave out {', '.join(settings)}, or call autoprof.stop()"
        )
    has_run = opened.joined() is not None if run_active else start(steps="+1", **settings) is not None
    if not has_run:  # the environment switches autoprof off, or an error was reported
        shell.run_cell(cell)
        return
    run = runtime.current()
    assert run is not None
    number = steps.state.executed + 1
    result = None
    try:
        with blocks.step(number), blocks.stage(_STAGE, role=_ROLE):
            result = shell.run_cell(cell)
            # IPython has already printed the cell's exception. Raise the exception again, so that the timeline records
            # that the cell failed.
            result.raise_error()
    except BaseException as error:
        seam.pass_on(error)
        if result is None or error not in (result.error_before_exec, result.error_in_exec):
            raise
    finally:
        settle(run) if run_active else stop()
    yield from _lines(run.rundir, number)
    if open_page:
        yield from _serve(run.rundir.path)


def _lines(run: RunDir, number: int) -> Iterator[str]:
    folder = run.step(number)
    steps = [step for step in runs.read(run.path).steps if step.number == number]
    captures = [capture for step in steps for capture in step.captures]
    if not captures:
        yield f"autoprof: step {number} of {run.path} is on the timeline; it was not captured"
    for capture in captures:
        if capture.state != "complete":
            yield f"autoprof: {folder}/{capture.name}: {capture.state}, {capture.meta.reason}"
    for path in sorted(folder.glob("*")) if captures else ():
        if not path.name.endswith((file_names.META, file_names.PART)):
            size = next(capture.bytes for capture in captures if path.name.startswith(capture.name))
            yield f"autoprof: {path} ({units.size(size)})"


def _serve(folder: Path) -> Iterator[str]:
    """Start `autoprof open` for the run, and yield the output lines that it prints before it serves.

    The server runs until the next cell with `--open`, or until the shell ends.
    """
    _close()
    command = [sys.executable, "-m", "autoprof", "open", str(folder)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AUTOPROF")}
    blocks.state.server = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    for line in blocks.state.server.stdout or ():
        if line.startswith(SERVING_MARK):
            return
        yield line.rstrip("\n")


def _close() -> None:
    server, blocks.state.server = blocks.state.server, None
    if server is not None:
        server.terminate()
        server.wait()
        if server.stdout is not None:
            server.stdout.close()
