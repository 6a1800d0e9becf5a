"""One real run of each older release of verl; many tests read what it left."""

from __future__ import annotations

import pytest

from tests.support.release_runs import CHOSEN, release_run
from tests.support.verl_runs import VerlRun

# Those whose metrics are the same in each run without autoprof.
REPEATABLE = ["verl-0.7.1", "verl-0.8.0"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that say how much is run."""
    parser.addoption("--releases", default=CHOSEN, help="the releases of verl, such as 'verl-0.5.0 verl-0.7.1'")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each test for each release."""
    if "name" in metafunc.fixturenames:
        metafunc.parametrize("name", metafunc.config.getoption("releases").split(), scope="session", indirect=True)


@pytest.fixture(scope="session")
def name(request: pytest.FixtureRequest) -> str:
    """A release."""
    found: str = request.param
    return found


@pytest.fixture(scope="session")
def run(name: str, tmp_path_factory: pytest.TempPathFactory) -> VerlRun:
    """Its run with autoprof."""
    return release_run(name, tmp_path_factory.mktemp(name), AUTOPROF="1", AUTOPROF_STEPS="2")


@pytest.fixture(scope="session")
def run_off(thorough: None, name: str, tmp_path_factory: pytest.TempPathFactory) -> VerlRun:
    """Its run without autoprof."""
    if name not in REPEATABLE:
        pytest.skip("no two runs of it are the same")
    return release_run(name, tmp_path_factory.mktemp(f"{name}-off"))
