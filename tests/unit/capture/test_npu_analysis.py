"""Analysis of torch_npu's folders, and the choice of the tool."""

from __future__ import annotations

import inspect
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from autoprof.base import files
from autoprof.capture import finisher, profilers, recorder
from autoprof.capture.artifacts import Subject
from autoprof.capture.profilers.npu import NpuTool
from autoprof.capture.profilers.torch import TorchTool, profile_arguments
from autoprof.cli import doctor as doctor_run
from autoprof.cli import main
from autoprof.config.settings import Settings
from autoprof.config.values import NpuOptions
from autoprof.run import end
from autoprof.run.runtime import Runtime
from autoprof.rundir import layout, runs
from tests.contracts import stored
from tests.support import npu_stand_in
from tests.support.captures import PROGRAM, SUBJECT, begun
from tests.support.helpers import TORCH, WHOLE_TORCH
from tests.support.npu_records import folder_of, meta_file, record, recorded
from tests.support.npu_stand_in import RELEASES

_HERE = "torch_npu.profiler.profiler"


# The analysis, later.


def unanalysed(made: Any, *steps: int) -> Runtime:
    """Return a run with a recording in each of these steps, without an analysis."""
    run: Runtime = made(npu=NpuOptions(analyse=False, export="db"))
    layout.write_json(run.rundir.run_json, run.describe())
    for step in steps:
        begun(run, Subject(step=step, role="actor", stage="update_actor", rank=3)).stop()
    end.wait_for_files(run)
    return run


@pytest.mark.usefixtures("torch_npu")
def test_without_analyse_the_folder_is_named_and_left_as_it_is(make: Any) -> None:
    run = unanalysed(make, 2)
    meta = meta_file(run)
    assert (meta["state"], meta["reason"]) == ("complete", "torch_npu has not analysed it")
    assert not (folder_of(run) / "ASCEND_PROFILER_OUTPUT").exists()
    (note,) = [note for note in doctor_run.examine_run(runs.read(run.rundir.path)).notes if "analyse" in note]
    assert note.endswith("torch_npu has not analysed it; run autoprof analyse")


@pytest.mark.usefixtures("torch_npu")
def test_autoprof_analyse(make: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run = unanalysed(make, 2, 3)
    path = str(run.rundir.path)
    # Files of an analysis that was killed.
    for folder in run.rundir.step(2).glob("*_ascend_pt"):
        (folder / "ASCEND_PROFILER_OUTPUT").mkdir()
    assert main.main(["analyse", path, "--step", "2"]) == 0
    assert capsys.readouterr().out.startswith("global_step_000002/actor.update_actor.rank3.")
    states = {folder.parent.name: finisher.is_analysed(str(folder)) for folder in run.rundir.path.rglob("*_ascend_pt")}
    assert states == {"global_step_000002": True, "global_step_000003": False}
    (meta,) = run.rundir.step(2).glob("*.meta.json")
    content = json.loads(meta.read_text())
    (folder,) = run.rundir.step(2).glob("*_ascend_pt")
    assert (content["reason"], content["bytes"]) == ("", files.size(str(folder)))
    assert main.main(["analyse", path]) == 0
    assert capsys.readouterr().out.count("analysed") == 1
    assert main.main(["analyse", path]) == 0
    assert capsys.readouterr().out == "all recordings are analysed already\n"


def test_autoprof_analyse_says_what_is_wrong(
    make: Any, torch_npu: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = unanalysed(make, 2)
    path = str(run.rundir.path)
    monkeypatch.setenv("TORCH_NPU_STAND_IN_FAULT", "analyse")
    assert main.main(["analyse", path]) == 1
    assert "torch_npu could not analyse it" in capsys.readouterr().out
    monkeypatch.delenv("PYTHONPATH")
    assert main.main(["analyse", path]) == 1
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].endswith("ModuleNotFoundError: No module named 'torch_npu'")
    assert main.main(["analyse", path, "--step", "9"]) == 1
    folder_of(run).rename(run.rundir.path / "elsewhere")
    assert main.main(["analyse", path]) == 1
    assert "has no complete torch_npu folders" in capsys.readouterr().err
    assert main.main(["analyse", path, "--step", "x"]) == 2


def test_an_analysis_that_hangs_is_ended(
    make: Any, torch_npu: Any, monkeypatch: pytest.MonkeyPatch, mocker: Any, tmp_path: Path
) -> None:
    # This process finishes the capture, and the analysis never ends.
    mocker.patch("autoprof.base.interpreter.find", side_effect=OSError)
    mocker.patch.multiple(finisher, _SIGN_OF_LIFE_S=0.05, _ANALYSE_TIMEOUT_S=0.1, _ANALYSE="while True: pass")
    real = finisher.finish
    mocker.patch.object(finisher, "finish", side_effect=lambda job: real(job | {"python": sys.executable}))
    assert record(make())["reason"] == "torch_npu has not analysed it"


def test_autoprof_yields_to_another_profiler_of_torch_npus(make: Any, torch_npu: Any, tmp_path: Path) -> None:
    recorder.watch_others()
    profiler = torch_npu.profiler

    def users() -> Any:
        handler = profiler.tensorboard_trace_handler(str(tmp_path / "users"), analyse_flag=False)
        return profiler.profile(activities=[profiler.ProfilerActivity.CPU], on_trace_ready=handler)

    run = make()
    with users():
        assert recorder.begin(run, SUBJECT) is None
    recording = begun(run)
    with users():
        pass
    recording.stop()
    meta = meta_file(run)
    assert (meta["state"], meta["reason"]) == ("truncated", "another torch_npu profiler was started in this process")
    assert len(list((tmp_path / "users").iterdir())) == 2


def test_autoprof_yields_to_verls_own_npu_profiler(python: Any, tmp_path: Path) -> None:
    code = """
from verl.utils.profiler import ProfilerConfig
from verl.utils.profiler.config import NPUToolConfig
from verl.utils.profiler.mstx_profile import NPUProfiler
recorder.watch_others()
tool = NPUToolConfig(contents=["npu"], level="level1", analysis=False, discrete=True)
theirs = NPUProfiler(rank=0, config=ProfilerConfig(save_path="verls"), tool_config=tool)
recording = recorder.begin(run, subject)
assert recording.tool.name == "npu"
theirs.annotate(role="actor_update")(lambda: print("called"))()
recording.stop()
"""
    here = {"PYTHONPATH": str(npu_stand_in.STAND_INS), "TORCH_NPU_STAND_IN": RELEASES[-1]}
    on = {"AUTOPROF": "1", "AUTOPROF_RUN_ID": "run"}
    result = python(PROGRAM.replace(TORCH, WHOLE_TORCH) + code, **here, **on)
    assert result.stdout.count("called") == 1
    (verls,) = (tmp_path / "verls" / "actor_update").iterdir()
    assert recorded(verls)[1]["mstx_domain_exclude"] == ["communication"]
    folder = tmp_path / "autoprof_runs" / "run" / "global_step_000002"
    deadline = time.monotonic() + 60
    while (list(folder.glob("*.part")) or not list(folder.glob("*.meta.json"))) and time.monotonic() < deadline:
        time.sleep(0.05)
    (meta,) = folder.glob("*.meta.json")
    assert json.loads(meta.read_text())["reason"] == "another torch_npu profiler was started in this process"


@pytest.mark.usefixtures("torch_npu")
@pytest.mark.parametrize("variable", ["MSMONITOR_USE_DAEMON", "PROF_CONFIG_PATH"])
def test_nothing_is_recorded_where_torch_npu_profiles_by_itself(
    make: Any, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "1")
    assert variable in NpuTool().busy()
    assert recorder.begin(make(), SUBJECT) is None
    monkeypatch.setenv(variable, "0")
    assert NpuTool().busy() == ""


# Choice of the tool.


@pytest.mark.parametrize("asked", [(), ("npu",), ("npu", "torch"), ("torch",), ("torch", "npu")])
def test_the_tool_where_npus_are_used(torch_npu: Any, asked: tuple[str, ...]) -> None:
    assert isinstance(profilers.choose(Settings(tool=asked)), NpuTool if asked[:1] != ("torch",) else TorchTool)


def test_a_process_that_uses_no_npu_takes_torchs(
    torch_npu: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCH_NPU_STAND_IN_IDLE", "1")
    assert isinstance(profilers.choose(Settings(tool=())), TorchTool)
    assert isinstance(profilers.choose(Settings(tool=("npu", "torch"))), TorchTool)
    assert caplog.text == ""
    assert isinstance(profilers.choose(Settings(tool=("npu",))), TorchTool)
    profilers.choose(Settings(tool=("npu",)))
    assert caplog.text.count("AUTOPROF_TOOL=npu: this process uses no NPU; torch.profiler records instead") == 1


def test_torchs_profiler_leaves_the_npu_alone(torch_npu: Any, mocker: Any) -> None:
    kinds = torch.profiler.ProfilerActivity
    mocker.patch("torch.profiler.supported_activities", return_value={kinds.CPU, kinds.PrivateUse1})
    assert profile_arguments(())[1] == profile_arguments(("cpu", "npu"))[1] == ["cpu"]
    npu_stand_in.remove()
    assert profile_arguments(())[1] == ["cpu", "npu"]


def test_without_torch_npu_nothing_of_it_is_imported(make: Any) -> None:
    assert isinstance(profilers.choose(Settings(tool=())), TorchTool)
    assert profilers.outlook(()) == "torch (no AUTOPROF_TOOL; torch_npu is not installed)"
    assert profilers.outlook(("torch",)) == "torch (AUTOPROF_TOOL)"


def test_doctor_says_which_tool_applies(make: Any, python: Any, tmp_path: Path) -> None:
    code = "from autoprof.capture import profilers; print(profilers.outlook(()))"
    path = {"PYTHONPATH": str(npu_stand_in.STAND_INS), "TORCH_NPU_STAND_IN": RELEASES[-1]}
    assert python(code, **path).stdout.strip() == "npu in processes that use an NPU, torch in others (no AUTOPROF_TOOL)"
    broken = tmp_path / "site" / "torch_npu"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('libascendcl.so: cannot open shared object file')")
    said = python(code, PYTHONPATH=str(broken.parent)).stdout
    assert "importing torch_npu raised ImportError: libascendcl.so" in said


# The stand-in, compared with the stored interfaces of the real releases.


@pytest.mark.parametrize("release", RELEASES)
def test_the_stand_in_takes_what_the_release_takes(make: Any, monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    profiler = npu_stand_in.install(monkeypatch, release).profiler
    contract = stored.contract("torch_npu", release)
    for name, there in (
        ("profile.__init__", profiler.profile),
        ("_ExperimentalConfig.__init__", profiler._ExperimentalConfig),
        ("tensorboard_trace_handler", profiler.tensorboard_trace_handler),
    ):
        known = stored.parameters(contract.find("torch_npu.profiler", name))
        assert [word for word in known if word not in ("self", "*")] == list(inspect.signature(there).parameters)
    with pytest.raises(TypeError):
        profiler._ExperimentalConfig(nothing_takes_this=1)
    for method in ("start", "step", "stop"):
        assert contract.has(_HERE, f"profile.{method}")
    creator = ("torch_npu.profiler._profiler_path_creator", "ProfPathCreator")
    assert all(contract.sets(*creator, name) for name in ("_dir_path", "_worker_name"))
    assert contract.has(creator[0], "ProfPathCreator.init")
    assert contract.has("torch_npu.npu", "is_initialized")
    # The call of the detached process.
    assert {"profiler_path", "max_process_number"} <= set(stored.parameters(contract.find(_HERE, "analyse")))
