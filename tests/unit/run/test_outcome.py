"""Outcomes of runs in the output of `ls`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from autoprof.rundir import runs
from tests.support.small_trainer import plain


@pytest.fixture
def ended(tmp_path: Path) -> Callable[..., runs.Run]:
    """Return a function that runs code after a step of a trainer and returns the run."""

    def run(code: str, status: int, **variables: str) -> runs.Run:
        result = plain(tmp_path, f"from small import *\nTrainer().fit(steps=1)\n{code}", **variables)
        assert result.returncode == status
        assert [line for line in result.stderr.splitlines() if line.startswith("autoprof")] == []
        return runs.find(tmp_path / "autoprof_runs", "latest")

    return run


@pytest.mark.parametrize(
    ("code", "status", "outcome"),
    [
        ("sys.exit()", 0, "ended"),
        ("sys.last_value = ValueError()", 0, "ended"),
        ("sys.exit(3)", 3, "failed (exit status 3)"),
        ("sys.exit('bad')", 1, "failed (exit status 1)"),
        ("raise RuntimeError('boom')", 1, "failed (RuntimeError, exit status 1)"),
        ("os._exit(3)", 3, "unfinished"),
        ("os.kill(os.getpid(), signal.SIGKILL)", -9, "unfinished"),
    ],
)
def test_the_outcome(ended: Callable[..., runs.Run], code: str, status: int, outcome: str) -> None:
    assert ended(code, status).outcome == outcome


@pytest.mark.parametrize("closed", ["1", "0, 1, 2"])
def test_text_for_a_closed_standard_output_does_not_reach_the_exit_status(
    ended: Callable[..., runs.Run], closed: str
) -> None:
    code = f"print('left in the buffer')\nfor number in ({closed},): os.close(number)"
    run = ended(code, 120, PYTHONUNBUFFERED="")
    assert Path(run.path, "exit_status").read_bytes() == bytes([120])


def test_a_resumed_run_forgets_the_status_of_the_attempt_before(ended: Callable[..., runs.Run]) -> None:
    ended("sys.exit(3)", 3, AUTOPROF_RUN_ID="mine")
    run = ended("os._exit(0)", 0, AUTOPROF_RUN_ID="mine")
    assert run.outcome == "unfinished"
    assert [attempt.state for attempt in run.info.earlier] == ["failed"]


def test_the_next_run_is_not_told_of_one_that_failed(ended: Callable[..., runs.Run]) -> None:
    assert runs.killed(Path(ended("sys.exit(3)", 3).path)) == ""
