"""One real run of each older release of verl; many tests read what it left."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from release_runs import EXAMPLES, NAMES, RUNNING, release_run
from verl_runs import VerlRun

# Those of which a run without autoprof is made as well.
COMPARED = ["verl-0.8.0"]


@pytest.fixture(scope="session")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model and its data."""
    folder = tmp_path_factory.mktemp("assets")
    subprocess.run([sys.executable, str(EXAMPLES / "make_assets.py"), str(folder)], check=True)
    return folder


@pytest.fixture(scope="session", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    """A release."""
    found: str = request.param
    return found


@pytest.fixture(scope="session")
def run(name: str, assets: Path, tmp_path_factory: pytest.TempPathFactory) -> VerlRun:
    """Its run with autoprof."""
    if name not in RUNNING:
        pytest.skip("does not run whole here")
    return release_run(name, tmp_path_factory.mktemp(name), assets, AUTOPROF="1", AUTOPROF_STEPS="2")


@pytest.fixture(scope="session")
def run_off(name: str, assets: Path, tmp_path_factory: pytest.TempPathFactory) -> VerlRun:
    """Its run without autoprof, for some."""
    if name not in COMPARED:
        pytest.skip("compared for other releases")
    return release_run(name, tmp_path_factory.mktemp(f"{name}-off"), assets)
