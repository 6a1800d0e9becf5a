"""Session fixtures for the runs of verl in the table. Each run is made once, and many tests read its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.real.run_table import RUNS, Planned
from tests.support.ray_clusters import cluster
from tests.support.verl_runs import VerlRun, verl_run

__all__ = ["cluster"]


def _fixture(name: str, planned: Planned) -> Any:
    @pytest.fixture(scope="session", name=name)
    def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> VerlRun:
        if planned.thorough:
            request.getfixturevalue("thorough")
        places = {"{before}": str(request.getfixturevalue(planned.before).folder)} if planned.before else {}
        folder = tmp_path_factory.mktemp(name)
        places["{folder}"] = str(folder)

        def placed(text: str) -> str:
            for place, path in places.items():
                text = text.replace(place, path)
            return text

        for path, content in planned.files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(content)
        return verl_run(
            folder,
            *map(placed, planned.overrides),
            asks=planned.asks,
            script=planned.script,
            packages=planned.packages,
            **{variable: placed(value) for variable, value in planned.settings.items()},
        )

    return run


globals().update({name: _fixture(name, planned) for name, planned in RUNS.items()})


@pytest.fixture(scope="session", params=["v1", "legacy"])
def profiled(request: pytest.FixtureRequest) -> VerlRun:
    """Run with autoprof, of each trainer."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session", params=["v1_off", "legacy_off"])
def unprofiled(request: pytest.FixtureRequest) -> VerlRun:
    """Run without autoprof, of each trainer."""
    return request.getfixturevalue(request.param)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("real")
