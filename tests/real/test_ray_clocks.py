"""Clocks of a cluster's nodes, measured through real Ray: three raylets on this machine, which share one clock."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import processes
from tests.support.helpers import clean_environment
from tests.support.ray_clusters import SCRIPTS


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("clocks")
    (folder / "lib" / "autoprof").mkdir(parents=True)
    (folder / "lib" / "autoprof" / "__init__.py").write_text("raise ImportError('not on this node')\n")
    command = [sys.executable, str(SCRIPTS / "clocks.py"), str(folder / "lib")]
    finished = processes.run(command, cwd=folder, env=clean_environment(AUTOPROF="1"), timeout_s=240)
    assert finished.status == 0, finished.output[-4000:]
    return finished.result


def test_the_measured_offset_of_each_other_host_is_right_within_its_error(measured: dict[str, Any]) -> None:
    (path,) = measured["files"]
    lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
    assert sorted(line["host"] for line in lines) == [f"{measured['host']}-0", f"{measured['host']}-1"]
    for line in lines:
        assert set(line) == {"host", "offset_ns", "error_ns", "unix_ns"}
        # All nodes share one clock, so the offset must be within the error.
        assert abs(line["offset_ns"]) <= line["error_ns"]
        assert 0 < line["error_ns"] < 1e9
        assert measured["begun"] <= line["unix_ns"] <= measured["ended"]
    assert Path(path).parent.parent.name == Path(path).parents[1].name


def test_nodes_of_the_trainers_host_have_no_line(measured: dict[str, Any]) -> None:
    assert measured["same_host"] == []


def test_a_removed_node_has_no_line(measured: dict[str, Any]) -> None:
    assert measured["one_gone"] == [f"{measured['host']}-0"]


def test_the_end_of_ray_ends_the_measurement_without_an_error(measured: dict[str, Any]) -> None:
    assert measured["alive"] == []
    assert measured["errors"] == []
