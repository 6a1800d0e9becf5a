"""Runs of further trainers on a machine without a GPU. Each trainer's packages precede the environment's packages."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support import processes
from tests.support.helpers import ROOT, clean_environment
from tests.support.trl_runs import Ran

SCRIPTS = ROOT / "tests" / "trainers" / "scripts"
REQUIREMENTS = ROOT / "tests" / "trainers" / "requirements"
# Names of the environments to test; `make test-trainers` sets TRAINERS.
NAMES = sorted(os.environ.get("TRAINERS", "").split()) or sorted(path.stem for path in REQUIREMENTS.glob("*.txt"))
# A quiet machine with 2 cores needs a minute or two.
TIMEOUT_S = 420


def packages_of(trainer: str) -> Path:
    """Return the folder with the packages of a trainer, such as `openrlhf`.

    The test is skipped if `TRAINERS` does not name this trainer.

    Raises:
        AssertionError: The folder does not exist.
    """
    named = [name for name in NAMES if name.rpartition("-")[0] == trainer]
    if not named:
        pytest.skip(f"TRAINERS names no release of {trainer}")
    folder = ROOT / ".venvs" / named[-1]
    assert (folder / ".ready").exists(), f"{folder} does not exist; run make test-trainers TRAINERS={named[-1]}"
    return folder


def environment(*path: Path, **variables: str) -> dict[str, str]:
    """Return the environment of a run, in which these folders precede the installed packages."""
    settings = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
    found = clean_environment(PYTHONPATH=":".join(map(str, path)), **settings, **variables)
    found.pop("PYTHONDONTWRITEBYTECODE", None)
    return found


def run(command: list[str], folder: Path, env: dict[str, str], timeout_s: float = TIMEOUT_S) -> Ran:
    """Run a trainer until it ends, then end all its processes.

    Raises:
        AssertionError: The trainer failed.
    """
    finished = processes.run_framework(command, cwd=folder, env=env, timeout_s=timeout_s)
    assert finished.status == 0, "\n".join(finished.output.splitlines()[-60:])
    return Ran(folder, finished.output)
