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
from autoprof.behaviours.trainer import open_step
from autoprof.config.values import SettingsError
from autoprof.run import runtime
from autoprof.rundir import file_names, runs
from autoprof.rundir.layout import RunDir

_ROLE, _STAGE = "notebook", "cell"
USAGE = "%%autoprof [--contents cpu,shapes] [--SETTING VALUE ...] [--open]"
# Beginning of the last line that `autoprof open` prints before it serves.
SERVING_MARK = "Ctrl-C"


def load_ipython_extension(shell: Any) -> None:
    """Register the magic `%%autoprof` in IPython."""

    def autoprof(line: str, cell: str) -> None:
        """Run the cell as one step and record it: %%autoprof [--contents cpu,shapes] [--SETTING VALUE ...] [--open]."""
        try:
            show, settings = _options(line)
            print(*_recorded(shell, cell, settings, show), sep="\n")
        except (SettingsError, OSError) as error:
            seam.pass_on(error)
            from IPython.core.error import UsageError

            raise UsageError(f"%%autoprof: {error}") from None

    shell.register_magic_function(autoprof, magic_kind="cell")
    weakref.finalize(shell, _close)


def _options(line: str) -> tuple[bool, dict[str, str]]:
    """Return whether the line has `--open`, and the settings in the line.

    Raises:
        SettingsError: The line does not have the form of `USAGE`, or it sets `steps`.
    """
    import shlex

    words = shlex.split(line, comments=True)
    settings: dict[str, str] = {}
    show = False
    while words:
        word = words.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if word == "--open":
            show = True
        elif word.startswith("--") and name and (equals or words):
            settings[name.replace("-", "_")] = value if equals else words.pop(0)
        else:
            raise SettingsError(f"got {word!r}; use {USAGE}")
    if "steps" in settings:
        raise SettingsError("--steps: the cell is one step and is always captured; leave --steps out")
    return show, settings


def _recorded(shell: Any, cell: str, settings: dict[str, str], show: bool) -> Iterator[str]:
    """Run a cell as one step, in a new run if none is active. Yield lines that say where its trace is."""
    run_active = blocks.state.on
    if run_active and settings:
        raise SettingsError(
            f"a run is already active and keeps its settings; leave out {', '.join(settings)}, or call autoprof.stop()"
        )
    started = opened.joined() is not None if run_active else session.start(steps="+1", **settings) is not None
    if not started:  # off in the environment, or failed with a message
        shell.run_cell(cell)
        return
    run = runtime.current()
    assert run is not None
    number = open_step.executed() + 1
    result = None
    try:
        with blocks.step(number), blocks.stage(_STAGE, role=_ROLE):
            result = shell.run_cell(cell)
            # IPython has already printed the exception. Raise it for the timeline, which records that the cell failed.
            result.raise_error()
    except BaseException as error:
        seam.pass_on(error)
        if result is None or error not in (result.error_before_exec, result.error_in_exec):
            raise
    finally:
        session.settle(run) if run_active else session.stop()
    yield from _lines(run.rundir, number)
    if show:
        yield from _serve(run.rundir.path)


def _lines(run: RunDir, number: int) -> Iterator[str]:
    folder = run.step(number)
    captures = [capture for step in runs.read(run.path).steps if step.number == number for capture in step.captures]
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
    """Serve the run as `autoprof open` does, until the next cell with `--open` or the end of the shell."""
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
