"""Processes that die, each in its way: the run says which one, of what, and what it was doing."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from autoprof.cli import main
from autoprof.rundir import death_words, deaths, runs
from autoprof.rundir.records import Death
from tests.support.small_trainer import Go, Python, prepare, warnings


@pytest.fixture
def go(tmp_path: Path, python: Python) -> Go:
    run = prepare(tmp_path, python)

    def without_captures(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return run(code, check=False, AUTOPROF_STEPS="none", **variables)

    return without_captures


def the_run(folder: Path) -> runs.Run:
    return runs.find(folder / "autoprof_runs", "latest")


def the_deaths(folder: Path) -> list[Death]:
    return deaths.of_run(the_run(folder))


def said(folder: Path) -> str:
    return death_words.text(the_deaths(folder)[0])


@pytest.mark.parametrize(
    ("end", "status", "text"),
    [
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            -signal.SIGKILL,
            "actor rank 0 is gone in update_actor of step 2 without a word: it was killed by a signal, or left by os._exit",
        ),
        (
            "os._exit(3)",
            3,
            "actor rank 0 is gone in update_actor of step 2 without a word: it was killed by a signal, or left by os._exit",
        ),
        (
            "__import__('ctypes').string_at(0)",
            -signal.SIGSEGV,
            "actor rank 0 crashed (SIGSEGV) in update_actor of step 2: ended.py:2 <lambda>",
        ),
        ("os.abort()", -signal.SIGABRT, "actor rank 0 crashed (SIGABRT) in update_actor of step 2: ended.py:2 <lambda>"),
    ],
)
def test_x(go: Go, tmp_path: Path, end: str, status: int, text: str) -> None:
    died = go(f"Trainer().fit(lambda: {end})")
    assert died.returncode == status
    assert warnings(died) == []
    assert the_run(tmp_path).state == "unfinished"
    print(the_deaths(tmp_path))
    print(death_words.evidence(the_deaths(tmp_path)))
    assert said(tmp_path) == text
