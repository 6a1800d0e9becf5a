"""The example of the tutorial: a user's own trainer with real torch, and a short recipe."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from autoprof.base.intervals import Union
from autoprof.report.model import OWN
from tests.support import helpers
from tests.support.helpers import ROOT, autoprof, clean_environment, spans

EXAMPLE = ROOT / "examples" / "own_trainer"
RECIPE = EXAMPLE / "small_trainer.toml"
STAGES = {"actor.update_actor", "rollout.generate"}

# Metadata of a distribution, as docs/reference/recipes.md shows it.
PYPROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "small-trainer-autoprof"
version = "0.1.0"

[project.entry-points."autoprof.recipes"]
small_trainer = "small_trainer_autoprof"
"""


def train(folder: Path, **variables: str) -> Path:
    """Run the example as a user would, and return its run directory."""
    command = [sys.executable, str(EXAMPLE / "train.py")]
    result = helpers.run(command, cwd=folder, AUTOPROF="1", AUTOPROF_STEPS="2,4", **variables)
    assert result.returncode == 0, result.stderr
    assert [line.split(":")[0] for line in result.stdout.splitlines()] == [f"step {number}" for number in range(1, 5)]
    assert "autoprof:" not in result.stderr
    (run,) = (folder / "autoprof_runs").glob("2*")
    return run


@pytest.fixture(scope="module")
def by_setting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("setting"), AUTOPROF_RECIPES=str(RECIPE))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Let pip install a distribution that contains only the recipe, and return the folder."""
    project = tmp_path_factory.mktemp("project")
    package = project / "small_trainer_autoprof"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('a package of recipes was imported')\n")
    shutil.copy(RECIPE, package)
    (project / "pyproject.toml").write_text(PYPROJECT)
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-index"]
    command += ["--no-deps", "--no-build-isolation", "--target", str(target), str(project)]
    subprocess.run(command, check=True, env=clean_environment(), timeout=120)
    return target


@pytest.fixture(scope="module")
def by_entry_point(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("entry_point"), PYTHONPATH=str(site))


@pytest.fixture(params=["by_setting", "by_entry_point"])
def run(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


def test_the_requested_steps_have_a_trace_of_each_stage(run: Path) -> None:
    for number in (2, 4):
        folder = run / f"global_step_{number:06d}"
        metas = [json.loads(path.read_text()) for path in folder.glob("*.meta.json")]
        assert {(meta["role"], meta["stage"], meta["state"]) for meta in metas} == {
            ("actor", "update_actor", "complete"),
            ("rollout", "generate", "complete"),
        }
        assert {meta["step"] for meta in metas} == {number}
    assert len(list(run.glob("global_step_*"))) == 2
    assert not list(run.rglob("*.part"))


def test_the_traces_contain_the_operators_of_their_stage(run: Path) -> None:
    def names(stage: str) -> set[str]:
        (path,) = run.glob(f"global_step_000002/{stage}.rank0.*.pt.trace.json.gz")
        with gzip.open(path) as file:
            return {event.get("name", "") for event in json.load(file)["traceEvents"]}

    generate, update = names("rollout.generate"), names("actor.update_actor")
    assert "aten::multinomial" in generate - update
    assert any(name.startswith("Optimizer.step#Adam") for name in update - generate)
    assert any("Backward" in name for name in update - generate)


def test_the_timeline_has_all_steps_and_their_stages(run: Path) -> None:
    (path,) = (run / "journal").glob("*.jsonl")
    found = spans(path)
    assert [span["step"] for span in found if span["kind"] == "step"] == [1, 2, 3, 4]
    assert [(span["name"], span["step"]) for span in found if span["kind"] == "stage"] == [
        (stage, number) for number in (1, 2, 3, 4) for stage in ("generate", "update_actor")
    ]


def test_the_time_of_profilers_is_a_separate_part_of_a_step(run: Path) -> None:
    profiling = [(span["step"], span["role"], span["name"]) for span in spans(run) if span["kind"] == "profiling"]
    assert sorted(profiling) == sorted(
        (number, role, name)
        for number in (2, 4)
        for role in ("rollout", "actor")
        for name in ("profiler start", "profiler stop", "export", "hand-over")
    )
    rows = json.loads(autoprof("report", str(run), "--json", cwd=run).stdout)["steps"]
    costs = Union(
        (span["start_ns"], span["end_ns"])
        for span in spans(run)
        if span["kind"] == "profiling" and span["name"] != "hand-over"
    )
    for row in rows:
        cost = costs.length(row["start_ns"], row["start_ns"] + round(row["seconds"] * 1e9))
        assert row["stages"].get(OWN, 0.0) == pytest.approx(cost / 1e9, abs=1e-6)


# Profiler that starts as slowly as Kineto does at its first start, when it looks for GPUs.
SLOW_START = """
import runpy, sys, time
import torch

def start(profile, begin=torch.profiler.profile.start):
    time.sleep(4)
    begin(profile)

torch.profiler.profile.start = start
sys.argv[1:] = ["9"]
runpy.run_path("train.py", run_name="__main__")
"""


@pytest.mark.fault("a real profiler takes 4 s to start, twice", "report counts the time as profiling", "nothing")
def test_the_time_of_a_capture_does_not_make_its_step_slow(tmp_path: Path) -> None:
    environment = clean_environment(
        AUTOPROF="1",
        AUTOPROF_STEPS="6",
        AUTOPROF_RECIPES=str(RECIPE),
        AUTOPROF_DIR=str(tmp_path),
        PYTHONPATH=str(EXAMPLE),
    )
    subprocess.run([sys.executable, "-c", SLOW_START], cwd=EXAMPLE, env=environment, timeout=300, check=True)
    report = json.loads(autoprof("report", "latest", "--dir", str(tmp_path), "--json", cwd=tmp_path).stdout)
    row = report["steps"][5]
    assert row["number"] == 6
    assert row["stages"][OWN] >= 8
    assert sum(row["stages"].values()) == pytest.approx(row["seconds"])
    # Findings of other causes are allowed: the machine may be busy, and recording slows operators down.
    own = row["seconds"] - row["stages"][OWN]
    assert sum(finding["seconds"] for finding in report["findings"] if finding["step"] == 6) <= own
    assert OWN not in "".join(finding["text"] for finding in report["findings"])


def test_run_json_names_the_recipe(run: Path) -> None:
    described = json.loads((run / "run.json").read_text())
    assert (described["recipes"], described["state"]) == (["small_trainer"], "ended")


def test_check_finds_the_trainer_in_the_recipes_folder() -> None:
    result = autoprof("recipes", "--check", "small_trainer.toml", cwd=EXAMPLE)
    assert result.stdout == "small_trainer.toml: good, 3 hooks; checked against small_trainer\n"
    assert result.returncode == 0


def test_recipes_and_doctor_list_an_installed_recipe(site: Path, by_entry_point: Path, tmp_path: Path) -> None:
    output = autoprof("recipes", "small_trainer", "--json", cwd=tmp_path, PYTHONPATH=str(site)).stdout
    listed = json.loads(output)["recipes"]
    assert [(entry["origin"], entry["fits"]) for entry in listed] == [("small-trainer-autoprof", "not installed")]
    # Disable the other recipes, whose targets take long to import.
    only = {
        "PYTHONPATH": f"{site}:{EXAMPLE}",
        "AUTOPROF_DISABLE": "verl,vllm,sglang,ray,trl,transformers",
        "AUTOPROF_DIR": str(tmp_path),
    }
    report = json.loads(autoprof("doctor", "--deep", "--json", cwd=tmp_path, **only).stdout)
    states = {key: state for key, state, _ in report["hooks"] if key.startswith("small_trainer/")}
    assert states == dict.fromkeys(["small_trainer/generate", "small_trainer/step", "small_trainer/update"], "applied")
    assert report["facts"]["recipe small_trainer"].endswith("from small-trainer-autoprof")
    assert report["facts"]["small_trainer"] == "without a version"
    assert autoprof("doctor", by_entry_point.name, "--dir", str(by_entry_point.parent), cwd=tmp_path).returncode == 0


def test_the_tutorial_shows_the_current_recipe() -> None:
    assert RECIPE.read_text().partition("\n")[2] in (ROOT / "docs" / "tutorial.md").read_text()
