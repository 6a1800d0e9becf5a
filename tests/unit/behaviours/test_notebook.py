"""Recorded cells of a notebook: `%%autoprof`."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoprof.rundir import runs
from tests.support.helpers import TORCH, Python, spans

# The part of IPython's shell that the magic uses.
SHELL = """
import autoprof
class Result:
    error_before_exec = error_in_exec = None
    def raise_error(self):
        if self.error_in_exec is not None:
            raise self.error_in_exec
class Shell:
    def register_magic_function(self, function, magic_kind):
        assert magic_kind == "cell"
        self.magic = function
    def run_cell(self, cell):
        result = Result()
        try:
            exec(cell, globals())
        except BaseException as error:
            result.error_in_exec = error
        return result
shell = Shell()
autoprof.load_ipython_extension(shell)
"""


def test_a_cell_is_a_step_of_a_new_run(python: Python, tmp_path: Path) -> None:
    code = """
shell.magic("--contents cpu,shapes --dir=runs", "x = torch.ones(3) + 1")
print(x.sum().item(), autoprof.stop())
"""
    said = python(TORCH + SHELL + code).stdout.splitlines()
    (run,) = runs.runs(tmp_path / "runs")
    (capture,) = run.captures
    assert (run.state, capture.state, capture.meta.role, capture.meta.contents) == (
        "ended",
        "complete",
        "notebook",
        ["cpu", "shapes"],
    )
    trace = Path(run.path) / "global_step_000001" / f"{capture.name}.pt.trace.json.gz"
    assert said[0].startswith(f"autoprof: {trace} (")
    assert said[1:] == ["6.0 None"]


def test_a_cell_is_a_step_of_the_active_run(python: Python, tmp_path: Path) -> None:
    code = """
run = autoprof.start("")
shell.magic("", "x = 1")
shell.magic("", "1 / 0")
with autoprof.step(7):
    pass
assert autoprof.stop() == run
"""
    said = python(TORCH + SHELL + code).stdout.splitlines()
    (run,) = runs.runs(tmp_path / "autoprof_runs")
    assert said == [
        f"autoprof: step {number} of {run.path} is on the timeline; it was not captured" for number in (1, 2)
    ]
    steps = [(span["step"], span.get("error")) for span in spans(Path(run.path)) if span["kind"] == "step"]
    assert steps == [(1, None), (2, "ZeroDivisionError"), (7, None)]


def test_ipython_has_the_magic(python: Python, tmp_path: Path) -> None:
    pytest.importorskip("IPython")
    code = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for cell in (
    "%load_ext autoprof",
    "import autoprof; run = autoprof.start('')",
    "%%autoprof\\nx = 1",
    "%%autoprof --dir x\\nx = 2",
    "autoprof.stop();",
    "%%autoprof --mode fast\\nx = 3",
    "%%autoprof fast\\nx = 4",
    "print(x)",
):
    shell.run_cell(cell)
"""
    done = python(code)
    said = done.stdout.splitlines() + done.stderr.splitlines()
    assert sum("is on the timeline" in line for line in said) == 1
    usage = [line.partition("%%autoprof: ")[2].split(";")[0] for line in said if line.startswith("UsageError")]
    assert usage == ["a run is already active and keeps its settings", "mode: got 'fast'", "got 'fast'"]
    assert "1" in done.stdout.splitlines()
