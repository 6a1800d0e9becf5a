"""`autoprof collect` connects only to the cluster that the user or the run names."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.helpers import autoprof
from tests.support.ray_clusters import Asked, cluster, going_on

__all__ = ["cluster"]


@pytest.fixture(scope="module")
def asked(cluster: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    with going_on(tmp_path_factory.mktemp("asked"), cluster) as asked:
        yield asked


def test_collect_in_an_empty_folder_joins_no_cluster(asked: Asked, tmp_path: Path) -> None:
    done = autoprof("collect", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "no Ray cluster is known: give --ray HOST:PORT, set RAY_ADDRESS" in done.stderr
    assert "connected" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_run_names_its_cluster(asked: Asked, tmp_path: Path) -> None:
    done = autoprof("collect", "--dir", str(asked.folder / "autoprof_runs"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == (
        f"autoprof: connected to the Ray cluster at {asked.address}, which run {asked.run.name} names\n"
    )
    assert json.loads((asked.run / "collected.json").read_text())["nodes"][0]["state"] == "here"


@pytest.mark.parametrize("name", ["latest", "its id"])
def test_collect_works_in_an_empty_folder_if_a_cluster_is_named(asked: Asked, tmp_path: Path, name: str) -> None:
    name = asked.run.name if name == "its id" else name
    done = autoprof("collect", name, cwd=tmp_path, RAY_ADDRESS=asked.address)
    assert done.returncode == 0, done.stderr
    assert done.stderr == f"autoprof: connected to the Ray cluster at {asked.address}, which RAY_ADDRESS names\n"
    assert (tmp_path / "autoprof_runs" / asked.run.name / "run.json").exists()


def test_the_address_that_auto_found_is_printed(asked: Asked, tmp_path: Path) -> None:
    done = autoprof("collect", "--ray", "auto", cwd=tmp_path, RAY_ADDRESS=asked.address)
    assert done.returncode == 0, done.stderr
    assert done.stderr == f"autoprof: connected to the Ray cluster at {asked.address}, which --ray auto found\n"


def test_nothing_is_collected_from_a_cluster_that_does_not_know_the_run(asked: Asked, tmp_path: Path) -> None:
    other = tmp_path / "autoprof_runs" / "20260101-000000-000"
    shutil.copytree(asked.run, other, ignore=shutil.ignore_patterns("collected.json"))
    done = autoprof("collect", cwd=tmp_path)
    assert done.returncode == 1
    assert f"the Ray cluster at {asked.address} does not know run {other.name}" in done.stdout
    assert not (other / "collected.json").exists()


@pytest.mark.parametrize("command", ["collect", "trigger", "stacks"])
def test_no_command_starts_a_cluster(tmp_path: Path, command: str) -> None:
    for address, variables in (("local", {}), ("auto", {"RAY_ADDRESS": "local"})):
        done = autoprof(command, "--ray", address, cwd=tmp_path, **variables)
        assert done.returncode == 1
        assert "'local' would start a new Ray cluster" in done.stderr
