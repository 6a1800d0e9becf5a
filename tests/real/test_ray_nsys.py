"""Real Ray actors under a stand-in for `nsys`: which actors run under it, their interpreter, and their reports."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from autoprof.capture.profilers import nsys
from autoprof.config.values import NsysOptions
from tests.support import processes
from tests.support.helpers import ROOT, autoprof, clean_environment

SCRIPTS = Path(__file__).parent / "nsys_scripts"
STAND_IN = ROOT / "tests" / "support" / "stand_ins" / "nsys"
# Longer than the end of a driver, so that a run that does not wait loses the last reports.
WRITES_S = 3.0
ON = {"AUTOPROF": "1", "AUTOPROF_TOOL": "nsys", "AUTOPROF_STEPS": "2,4", "AUTOPROF_RECIPES": str(SCRIPTS)}


@dataclass(frozen=True)
class Driven:
    folder: Path
    output: str
    actors: list[dict[str, Any]]

    def captures(self) -> dict[str, dict[str, Any]]:
        """Return the meta file of each capture, by step, role and stage."""
        found = {}
        for path in self.folder.glob("autoprof_runs/latest/global_step_*/*.meta.json"):
            found[f"{path.parent.name[-1]} {path.name.split('.rank')[0]}"] = json.loads(path.read_text())
        return found


def environment(path: Path, folder: Path) -> dict[str, str]:
    """Return an environment without `python` on PATH, as if no virtual environment were activated."""
    bare = folder / "bin"
    bare.mkdir()
    for name in ("sh", "bash", "dirname", "rm"):
        (bare / name).symlink_to(str(shutil.which(name)))
    (bare / "python3").symlink_to(os.path.realpath(sys.executable))
    variables = clean_environment(NSYS_STAND_IN_LOG=str(folder))
    return variables | {"PATH": f"{path}:{bare}", "NSYS_STAND_IN_WRITES_S": str(WRITES_S)}


def drive(folder: Path, path: Path, **variables: str) -> Driven:
    command = [sys.executable, str(SCRIPTS / "driver.py")]
    finished = processes.run(command, cwd=folder, env=environment(path, folder) | variables, timeout_s=180)
    assert finished.status == 0, finished.output[-4000:]
    assert finished.left_behind == []
    return Driven(folder, finished.output, finished.result)


@pytest.fixture(scope="module")
def driven(tmp_path_factory: pytest.TempPathFactory) -> Driven:
    return drive(tmp_path_factory.mktemp("nsys"), STAND_IN, **ON)


def test_the_actor_whose_rank_is_captured_runs_under_nsys(driven: Driven) -> None:
    under = [bool(actor["NSYS_PROFILING_SESSION_ID"]) for actor in driven.actors]
    assert under == [True, False, False]
    first = driven.actors[0]
    command = json.loads((driven.folder / f"{first['pid']}.json").read_text())
    expected = nsys.profile_options(NsysOptions(executable=str(STAND_IN / "nsys")))
    assert expected["capture-range-end"] == "repeat:async"
    assert {name: command["options"][name] for name in expected} == expected
    assert command["output"].endswith(f"/logs/nsight/autoprof_{first['pid']}")
    assert command["command"][0] == "python"


def test_actors_keep_the_interpreter_of_the_driver(driven: Driven) -> None:
    assert {actor["executable"] for actor in driven.actors} == {sys.executable}


def test_reports_are_in_the_step_folders_when_ray_has_ended(driven: Driven) -> None:
    assert "REPORTS 4" in driven.output
    captures = driven.captures()
    names = [f"{step} actor.{stage}" for step in (2, 4) for stage in ("compute_log_prob", "update_actor")]
    assert sorted(captures) == names
    pid = driven.actors[0]["pid"]
    for number, name in enumerate(names, 1):
        meta = captures[name]
        assert (meta["tool"], meta["state"], meta["rank"]) == ("nsys", "complete", 0), (name, meta)
        step = driven.folder / "autoprof_runs" / "latest" / f"global_step_00000{name[0]}"
        (report,) = step.glob(f"{name[2:]}.rank0.*.nsys-rep")
        assert report.read_text() == f"window {number} of {pid}"
    assert list(driven.folder.rglob("*.part")) == []


def test_ranges_name_step_role_and_stage(driven: Driven) -> None:
    assert driven.actors[0]["nvtx"] == [
        f"step {step} actor.{stage}" for step in (2, 4) for stage in ("compute_log_prob", "update_actor")
    ]


@pytest.mark.usefixtures("thorough")
def test_without_nsys_the_run_uses_torch_and_reports_it(tmp_path: Path) -> None:
    driven = drive(tmp_path, tmp_path / "nowhere", **ON)
    assert [actor["NSYS_PROFILING_SESSION_ID"] for actor in driven.actors] == ["", "", ""]
    assert driven.output.count("there is no nsys on the path; actors are not started under nsys") == 1
    assert {(meta["tool"], meta["state"]) for meta in driven.captures().values()} == {("torch", "complete")}
    said = autoprof("doctor", "latest", cwd=tmp_path)
    assert "no process that was captured ran under it" in said.stdout
    assert said.returncode == 1


def test_doctor_reports_if_nsys_is_installed(tmp_path: Path) -> None:
    variables = {"AUTOPROF_TOOL": "nsys", "AUTOPROF_DISABLE": "verl,vllm,sglang,trl,transformers,ray"}
    for path, missing in ((f"{STAND_IN}:{os.environ['PATH']}", False), ("/usr/bin:/bin", True)):
        said = autoprof("doctor", "--json", cwd=tmp_path, PATH=path, **variables)
        found = json.loads(said.stdout)
        assert any("nsys is not on the PATH" in problem for problem in found["problems"]) == missing
        assert found["facts"].get("nsys", "").startswith("2026.1.1.0-stand-in") != missing
