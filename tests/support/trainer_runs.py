"""Runs of further trainers, each its own packages in front of those of the environment, on a machine without a GPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support import processes
from tests.support.helpers import ROOT, clean_environment
from tests.support.trl_runs import Ran

SCRIPTS = ROOT / "tests" / "trainers" / "scripts"
REQUIREMENTS = ROOT / "tests" / "trainers" / "requirements"
# Those that are tested: `make test-trainers` says which.
NAMES = sorted(os.environ.get("TRAINERS", "").split()) or sorted(path.stem for path in REQUIREMENTS.glob("*.txt"))
# A quiet machine with 2 cores needs a minute or two.
TIMEOUT_S = 420


def packages_of(trainer: str) -> Path:
    """The folder with the packages of a trainer, such as `openrlhf`, in the release that is tested.

    The test is skipped where this trainer is not among those that are tested.

    Raises:
        AssertionError: The folder was not made.
    """
    named = [name for name in NAMES if name.rpartition("-")[0] == trainer]
    if not named:
        pytest.skip(f"TRAINERS names no release of {trainer}")
    folder = ROOT / ".venvs" / named[-1]
    assert (folder / ".ready").exists(), f"{folder} is not there; run make test-trainers TRAINERS={named[-1]}"
    return folder


def environment(*path: Path, **variables: str) -> dict[str, str]:
    """The environment of a run, with these folders in front of the installed packages."""
    settings = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
    found = clean_environment(PYTHONPATH=":".join(map(str, path)), **settings, **variables)
    found.pop("PYTHONDONTWRITEBYTECODE", None)
    return found


def run(command: list[str], folder: Path, env: dict[str, str], timeout_s: float = TIMEOUT_S) -> Ran:
    """Run a trainer to its end; nothing of it is left behind.

    Raises:
        AssertionError: It failed.
    """
    finished = processes.run_framework(command, cwd=folder, env=env, timeout_s=timeout_s)
    assert finished.status == 0, "\n".join(finished.output.splitlines()[-60:])
    return Ran(folder, finished.output)
