"""One real run of each older release of verl; many tests read its files."""

from __future__ import annotations

import pytest

from tests.support.release_runs import CHOSEN, release_run
from tests.support.verl_runs import VerlRun

# Releases whose metrics are the same in each run without autoprof.
REPEATABLE = ["verl-0.7.1", "verl-0.8.0"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the command-line option `--releases`."""
    parser.addoption("--releases", default=CHOSEN, help="the releases of verl, such as 'verl-0.5.0 verl-0.7.1'")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize each test with the releases."""
    if "name" in metafunc.fixturenames:
        metafunc.parametrize("name", metafunc.config.getoption("releases").split(), scope="session", indirect=True)


@pytest.fixture(scope="session")
def name(request: pytest.FixtureRequest) -> str:
    """Name of a release, such as `verl-0.7.1`."""
    return request.param


@pytest.fixture(scope="session")
def run(name: str, tmp_path_factory: pytest.TempPathFactory) -> VerlRun:
    """Run the release with autoprof."""
    return release_run(name, tmp_path_factory.mktemp(name), AUTOPROF="1", AUTOPROF_STEPS="2")


@pytest.fixture(scope="session")
def run_off(thorough: None, name: str, tmp_path_factory: pytest.TempPathFactory) -> VerlRun:
    """Run the release without autoprof."""
    if name not in REPEATABLE:
        pytest.skip("runs of this release differ from each other even without autoprof")
    return release_run(name, tmp_path_factory.mktemp(f"{name}-off"))
