"""`%load_ext autoprof` and `%%autoprof`, which records one cell of a notebook as one step."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autoprof.base import interrupts, process, units
from autoprof.base.originals import os, subprocess
from autoprof.behaviours.script import blocks, opened, session
from autoprof.behaviours.trainer import open_step
from autoprof.config.values import SettingsError
from autoprof.run import runtime
from autoprof.rundir import file_names, runs
from autoprof.rundir.layout import RunDir

_ROLE, _STAGE = "notebook", "cell"
_USAGE = "%%autoprof [--contents cpu,shapes] [--SETTING VALUE ...] [--open]"
# The last line that `autoprof open` prints when it serves.
_SERVES = "Ctrl-C"


class _State(process.State):
    """The server of `autoprof open` that shows what the last cell left. It outlives the cell's run."""

    server: subprocess.Popen[str] | None = None

    def in_child(self) -> None:
        self.server = None


_state = _State()


def load_ipython_extension(shell: Any) -> None:
    """Give IPython the magic `%%autoprof`."""

    def autoprof(line: str, cell: str) -> None:
        """Run the cell as one step and record it: %%autoprof [--contents cpu,shapes] [--SETTING VALUE ...] [--open]"""
        try:
            show, given = _options(line)
            print(*_recorded(shell, cell, given, show), sep="\n")
        except (SettingsError, OSError) as error:
            interrupts.pass_on(error)
            from IPython.core.error import UsageError

            raise UsageError(f"%%autoprof: {error}") from None

    shell.register_magic_function(autoprof, magic_kind="cell")
    weakref.finalize(shell, _close)


def _options(line: str) -> tuple[bool, dict[str, str]]:
    """Return whether the trace is to be shown, and the settings that a line gives.

    Raises:
        SettingsError: It is none of this form.
    """
    import shlex

    words = shlex.split(line, comments=True)
    given: dict[str, str] = {}
    show = False
    while words:
        word = words.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if word == "--open":
            show = True
        elif word.startswith("--") and name and (equals or words):
            given[name.replace("-", "_")] = value if equals else words.pop(0)
        else:
            raise SettingsError(f"got {word!r}; it takes {_USAGE}")
    if "steps" in given:
        raise SettingsError("--steps: the cell is one step, and is captured; leave it out")
    return show, given


def _recorded(shell: Any, cell: str, given: dict[str, str], show: bool) -> Iterator[str]:
    """Run a cell as a step, of a run of its own where none goes on, and yield lines that say where its trace is."""
    going = blocks.state.on
    if going and given:
        raise SettingsError(
            f"a run is going on, whose settings count; leave out {', '.join(given)}, or autoprof.stop()"
        )
    started = opened.joined() is not None if going else session.start(steps="+1", **given) is not None
    if not started:  # it is off in the environment, or failed and has said so
        shell.run_cell(cell)
        return
    run = runtime.current()
    assert run is not None
    number = open_step.executed() + 1
    done = None
    try:
        with blocks.step(number), blocks.stage(_STAGE, role=_ROLE):
            done = shell.run_cell(cell)
            # IPython has shown the exception: it is raised for the timeline, which says that the cell failed.
            done.raise_error()
    except BaseException as error:
        interrupts.pass_on(error)
        if done is None or error not in (done.error_before_exec, done.error_in_exec):
            raise
    finally:
        session.settle(run) if going else session.stop()
    yield from _lines(run.rundir, number)
    if show:
        yield from _opened(run.rundir.path)


def _lines(run: RunDir, number: int) -> Iterator[str]:
    found = run.step(number)
    captures = [capture for step in runs.read(run.path).steps if step.number == number for capture in step.captures]
    if not captures:
        yield f"autoprof: step {number} of {run.path} is on the timeline; it was not captured"
    for capture in captures:
        if capture.state != "complete":
            yield f"autoprof: {found}/{capture.name}: {capture.state}, {capture.meta.reason}"
    for path in sorted(found.glob("*")) if captures else ():
        if not path.name.endswith((file_names.META, file_names.PART)):
            size = next(capture.bytes for capture in captures if path.name.startswith(capture.name))
            yield f"autoprof: {path} ({units.size(size)})"


def _opened(folder: Path) -> Iterator[str]:
    """Serve the run as `autoprof open` does, until the next cell that is shown or the end of the shell."""
    _close()
    command = [sys.executable, "-m", "autoprof", "open", str(folder)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AUTOPROF")}
    _state.server = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    for line in _state.server.stdout or ():
        if line.startswith(_SERVES):
            return
        yield line.rstrip("\n")


def _close() -> None:
    server, _state.server = _state.server, None
    if server is not None:
        server.terminate()
        server.wait()
        if server.stdout is not None:
            server.stdout.close()
