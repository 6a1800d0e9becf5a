"""One real run of each older release of verl; many tests read what it left."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from release_runs import EXAMPLES, NAMES, RUNNING, release_run
from verl_runs import VerlRun

# Those of which a run without autoprof is made as well, with `--every-release`.
COMPARED = ["verl-0.5.0", "verl-0.7.1", "verl-0.8.0"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """How much is run."""
    parser.addoption(
        "--every-release", action="store_true", help="run every older release of verl, and some without autoprof"
    )


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
def run(name: str, assets: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> VerlRun:
    """Its run with autoprof."""
    if name not in RUNNING and not request.config.getoption("every_release"):
        pytest.skip("runs with --every-release")
    return release_run(name, tmp_path_factory.mktemp(name), assets, AUTOPROF="1", AUTOPROF_STEPS="2")


@pytest.fixture(scope="session")
def run_off(
    name: str, assets: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> VerlRun:
    """Its run without autoprof, for some."""
    if name not in COMPARED or not request.config.getoption("every_release"):
        pytest.skip("compared with --every-release, for some releases")
    return release_run(name, tmp_path_factory.mktemp(f"{name}-off"), assets)
