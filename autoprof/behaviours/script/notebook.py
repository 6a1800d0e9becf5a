"""Notebook extension: `%load_ext autoprof`, and `%%autoprof`, which records one cell as one step."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autoprof.base import seam, units
from autoprof.base.originals import os, subprocess
from autoprof.behaviours.script import blocks, opened, session
from autoprof.behaviours.trainer import steps
from autoprof.config.values import SettingsError
from autoprof.run import runtime
from autoprof.rundir import file_names, runs
from autoprof.rundir.layout import RunDir

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
    has_run = opened.joined() is not None if run_active else session.start(steps="+1", **settings) is not None
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
        session.settle(run) if run_active else session.stop()
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
