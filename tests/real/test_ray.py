"""Real Ray actors: hooks are called in each kind of class, and settings reach the workers of any cluster."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support import processes
from tests.support.distributions import declare, install
from tests.support.helpers import ROOT, clean_environment, spans, wait_for
from tests.support.ray_clusters import ON, SCRIPTS
from tests.support.traces import kineto, process, save

HOOKED = {
    "Decorated.work",
    "Decorated.awork",
    "DecoratedWithOptions.work",
    "Inherits.work",
    "Inherits.awork",
    "Later.work",
    "Later.awork",
    "InMain.work",
    "InMain.awork",
    "PlainInMain.work",
}


@dataclass(frozen=True)
class Driven:
    folder: Path
    output: str
    result: dict[str, Any]

    @property
    def spans(self) -> dict[str, list[int]]:
        """Pids of the processes that called each hook, by stage."""
        found: dict[str, list[int]] = {}
        for path in self.folder.glob("autoprof_runs/latest/journal/*.jsonl"):
            pid = int(path.stem.rpartition("-")[2])
            for span in spans(path):
                found.setdefault(span["name"], []).append(pid)
        return found


def drive(folder: Path, *arguments: str, **variables: str) -> Driven:
    command = [sys.executable, str(SCRIPTS / "driver.py"), *arguments]
    finished = processes.run(command, cwd=folder, env=clean_environment(**variables), timeout_s=120)
    assert finished.status == 0, finished.output[-4000:]
    assert finished.left_behind == []
    return Driven(folder, finished.output, finished.result)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Driven:
    """Run the driver with autoprof on a cluster that it starts."""
    return drive(tmp_path_factory.mktemp("local"), "local", **ON)


@pytest.fixture(scope="module")
def hidden(tmp_path_factory: pytest.TempPathFactory) -> Driven:
    """Run the driver with autoprof on a cluster whose workers can't import autoprof."""
    folder = tmp_path_factory.mktemp("hidden")
    (folder / "lib" / "autoprof").mkdir(parents=True)
    (folder / "lib" / "autoprof" / "__init__.py").write_text("raise ImportError('not on this node')\n")
    return drive(folder, "local", str(folder / "lib"), **ON)


@pytest.fixture(scope="module")
def joined(cluster: str, tmp_path_factory: pytest.TempPathFactory) -> Driven:
    """Run the driver with autoprof on a cluster that was started without autoprof."""
    return drive(tmp_path_factory.mktemp("joined"), cluster, **ON)


@pytest.fixture(scope="module")
def declared(cluster: str, tmp_path_factory: pytest.TempPathFactory) -> Driven:
    """Run the driver on that cluster with the recipes of a distribution that only the driver has on its path."""
    folder = tmp_path_factory.mktemp("declared")
    package = install(folder / "site", "ray-recipes", declare("ray_recipes"))
    for recipe in SCRIPTS.glob("*.toml"):
        shutil.copy(recipe, package)
    return drive(folder, cluster, AUTOPROF="1", PYTHONPATH=str(folder / "site"))


@pytest.mark.parametrize("where", ["local", "joined", "declared"])
def test_each_hook_is_called_once_in_the_actors_process(where: str, request: pytest.FixtureRequest) -> None:
    if where == "declared":
        request.getfixturevalue("thorough")
    driven: Driven = request.getfixturevalue(where)
    called = driven.result["called"]
    assert {value for value, _ in called.values()} == {42}
    assert driven.spans == {name: [called[name][1]] for name in HOOKED}
    assert driven.result["driver"] not in [pid for _, pid in called.values()]


def test_a_worker_that_can_not_import_autoprof_runs_the_users_methods(hidden: Driven) -> None:
    assert {value for value, _ in hidden.result["called"].values()} == {42}
    assert hidden.result["modules"] == []
    assert hidden.spans == {}


@pytest.mark.parametrize("where", ["local", "joined"])
def test_start_profile_is_added_to_a_server_without_it(where: str, request: pytest.FixtureRequest) -> None:
    driven: Driven = request.getfixturevalue(where)
    assert "has no engine" in driven.result["asked"]["problem"]


def test_the_added_method_answers_on_a_node_without_autoprof(hidden: Driven) -> None:
    assert hidden.result["asked"] == {}


def test_workers_of_a_cluster_started_before_get_settings_and_run_id(joined: Driven) -> None:
    variables = joined.result["environment"]
    assert variables["AUTOPROF"] == "1"
    assert variables["AUTOPROF_RUN_ID"] == (joined.folder / "autoprof_runs" / "latest").resolve().name
    assert variables["MINE"] == "kept"
    assert "autoprof.hooks.patching" in joined.result["modules"]


def test_the_users_runtime_env_takes_precedence(cluster: str, tmp_path: Path) -> None:
    driven = drive(tmp_path, cluster, AUTOPROF="1", AUTOPROF_STEPS="3", USER_STEPS="7")
    assert driven.result["environment"]["AUTOPROF_STEPS"] == "7"


JOB = """
import json, os, sys, ray
@ray.remote
def shown():
    import mine
    return mine.__file__, os.environ["PYTHONPATH"].split(os.pathsep), "autoprof._boot" in sys.modules
ray.init(address=sys.argv[1])
print("RESULT " + json.dumps(ray.get(shown.remote())), flush=True)
"""


def test_the_pythonpath_of_a_job_comes_before_autoprofs(cluster: str, tmp_path: Path) -> None:
    """Ray passes a job's runtime environment to its entry point in an environment variable."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "mine.py").touch()
    (tmp_path / "main.py").write_text(JOB)
    config = {"runtime_env": {"env_vars": {"PYTHONPATH": str(theirs)}}}
    job = {"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(config), "PYTHONPATH": str(theirs)}
    command = [sys.executable, "-m", "autoprof", "run", "--steps=", "--", sys.executable, "main.py", cluster]
    finished = processes.run(command, cwd=tmp_path, env=clean_environment(**job), timeout_s=120)
    assert finished.status == 0, finished.output[-4000:]
    file, folders, activated = finished.result
    assert (file, folders[0], activated) == (str(theirs / "mine.py"), str(theirs), True)
    assert str(ROOT / "sitecustomize") in folders


def test_without_autoprof_workers_get_nothing(cluster: str, tmp_path: Path) -> None:
    driven = drive(tmp_path, cluster)
    assert driven.result["environment"] == {"MINE": "kept"}
    assert driven.result["modules"] == []
    assert not (tmp_path / "autoprof_runs").exists()


def test_ray_initialised_before_autoprof_is_reported_once(tmp_path: Path) -> None:
    code = """
import os, ray
ray.init(address="local", num_cpus=1, include_dashboard=False, object_store_memory=100_000_000)
os.environ["AUTOPROF"] = "1"
import _autoprof_gate
_autoprof_gate.activate()
"""
    finished = processes.run([sys.executable, "-c", code], cwd=tmp_path, env=clean_environment(), timeout_s=120)
    assert finished.status == 0, finished.output
    assert finished.output.count("Ray was initialised before autoprof was loaded") == 1


def test_a_merge_outlives_the_worker_that_started_it(tmp_path: Path) -> None:
    """Ray kills the child processes of a worker."""
    step = tmp_path / "run" / "global_step_000002"
    for rank in range(2):
        name = f"rollout.replica0.rank{rank}.h.pid{rank}"
        save(step / f"{name}.pt.trace.json.gz", kineto(process(7, "p", count=20_000)))
        (step / f"{name}.meta.json").write_text(json.dumps({"state": "complete", "replica": 0, "rank": rank}))
    command = [sys.executable, str(SCRIPTS / "merging.py"), str(tmp_path / "run")]
    finished = processes.run(command, cwd=tmp_path, env=clean_environment(), timeout_s=120)
    assert finished.status == 0, finished.output[-4000:]
    merged = json.loads(wait_for(step / "rollout.replica0.merged.meta.json"))
    assert (merged["state"], len(merged["merged"])) == ("complete", 2)
