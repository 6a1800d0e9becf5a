"""The tool npu, against a stand-in that takes what five releases of torch_npu take and writes what they write."""

from __future__ import annotations

import inspect
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import npu_stand_in
import pytest
import stored
import torch
from npu_stand_in import RELEASES

from autoprof import _finish, capture, cli, doctor_run, ending, listing, rundir, tools
from autoprof.naming import Subject
from autoprof.options import NpuOptions
from autoprof.runtime import Runtime
from autoprof.settings import Settings
from autoprof.tools.npu import NpuTool
from autoprof.tools.npu_config import experimental_config
from autoprof.tools.torch import TorchTool, profile_arguments

SUBJECT = Subject(step=2, role="actor", stage="update_actor", rank=3)
_HERE = "torch_npu.profiler.profiler"


@pytest.fixture
def make(made: Callable[..., Runtime]) -> Iterator[Callable[..., Runtime]]:
    """Makes a run with these settings. There is no torch_npu afterwards."""
    yield made
    npu_stand_in.remove()


@pytest.fixture
def torch_npu(make: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The newest release that is stored."""
    return npu_stand_in.install(monkeypatch)


def record(run: Runtime) -> dict[str, Any]:
    """Capture a stage; returns the meta file."""
    recording = capture.begin(run, SUBJECT)
    assert recording is not None
    capture.end(recording)
    return meta_file(run)


def meta_file(run: Runtime) -> dict[str, Any]:
    ending.wait_for_files(run)
    (path,) = run.rundir.path.rglob("*.meta.json")
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def folder_of(run: Runtime) -> Path:
    (folder,) = run.rundir.path.rglob("*_ascend_pt")
    return folder


def recorded(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What torch_npu was asked to record."""
    (info,) = folder.glob("profiler_info*.json")
    config = json.loads(info.read_text())["config"]
    return config["common_config"], config["experimental_config"]


@pytest.mark.parametrize("release", RELEASES)
def test_each_release_is_asked_for_what_it_takes(make: Any, monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    npu_stand_in.install(monkeypatch, release)
    run = make(contents=("cpu", "npu", "cuda", "shapes", "stack", "memory", "module", "flops"))
    meta = record(run)
    assert (meta["tool"], meta["state"], meta["reason"]) == ("npu", "complete", "")
    assert meta["contents"] == ["cpu", "npu", "shapes", "stack", "memory", "module", "flops"]
    assert meta["left_out"] == ["cuda"]
    assert meta["versions"]["torch_npu"] == release
    common, experimental = recorded(folder_of(run))
    assert common.pop("activities") == ["ProfilerActivity.CPU", "ProfilerActivity.NPU"]
    assert set(common.values()) == {True}
    assert (experimental["profiler_level"], experimental["export_type"]) == ("Level1", "Text")
    ranges = {name for name in ("mstx", "msprof_tx") if experimental.get(name)}
    assert ranges == ({"msprof_tx"} if release == "2.5.1" else {"mstx"})
    assert ("mstx_domain_exclude" in experimental) == (release != "2.5.1")


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({}, {"profiler_level": "Level1", "aic_metrics": "PipeUtilization", "export_type": "Text"}),
        ({"level": "level2", "aic_metrics": "memory_ub"}, {"profiler_level": "Level2", "aic_metrics": "MemoryUB"}),
        ({"level": "level0"}, {"profiler_level": "Level0", "aic_metrics": "AiCoreNone"}),
        ({"level": "level_none"}, {"profiler_level": "Level_none", "aic_metrics": "AiCoreNone"}),
        ({"aic_metrics": "none"}, {"profiler_level": "Level1", "aic_metrics": "AiCoreNone"}),
        ({"export": "db", "op_attr": True}, {"export_type": "Db", "op_attr": True}),
        ({"export": "both", "l2_cache": True}, {"export_type": ["Text", "Db"], "l2_cache": True}),
    ],
)
def test_options(
    make: Any, monkeypatch: pytest.MonkeyPatch, release: str, options: dict[str, Any], asked: dict[str, Any]
) -> None:
    profiler = npu_stand_in.install(monkeypatch, release).profiler
    config, lacking = experimental_config(profiler, NpuOptions(**options))
    assert {name: config.arguments[name] for name in asked} == asked
    assert lacking == []


@pytest.mark.parametrize("metrics", sorted(get_args(get_type_hints(NpuOptions)["aic_metrics"])))
@pytest.mark.parametrize("release", RELEASES)
def test_each_metric_is_one_of_the_releases(monkeypatch: pytest.MonkeyPatch, release: str, metrics: str) -> None:
    profiler = npu_stand_in.install(monkeypatch, release).profiler
    config, lacking = experimental_config(profiler, NpuOptions(aic_metrics=metrics))
    assert config.arguments["aic_metrics"] in vars(profiler.AiCMetrics)
    assert lacking == []


def test_ranges_that_frameworks_mark_can_be_left_out(torch_npu: Any) -> None:
    config, _ = experimental_config(torch_npu.profiler, NpuOptions(mstx=False))
    assert not {"mstx", "msprof_tx", "mstx_domain_exclude"} & set(config.arguments)


def test_what_this_torch_npu_has_not_is_left_out_and_named(
    make: Any, torch_npu: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # As the parameters were before lists, and without the cache (experimental_config.py before 2.5).
    kind = torch_npu.profiler._ExperimentalConfig
    kept = [
        parameter.replace(annotation="str" if name == "export_type" else parameter.annotation)
        for name, parameter in inspect.signature(kind).parameters.items()
        if name != "l2_cache"
    ]
    monkeypatch.setattr(kind, "__signature__", inspect.Signature(kept), raising=False)
    monkeypatch.delattr(torch_npu.profiler.AiCMetrics, "MemoryAccess")
    run = make(npu=NpuOptions(export="both", l2_cache=True, aic_metrics="memory_access"))
    meta = record(run)
    assert meta["left_out"] == ["npu.aic_metrics", "npu.export", "npu.l2_cache"]
    assert meta["state"] == "complete"
    assert recorded(folder_of(run))[1]["export_type"] == "Text"
    said = "options left out, which npu does not know here: npu.aic_metrics, npu.export, npu.l2_cache"
    assert caplog.text.count(said) == 1


@pytest.mark.usefixtures("torch_npu")
@pytest.mark.parametrize(
    ("options", "left_out"),
    [({"op_attr": True}, ["npu.op_attr"]), ({"level": "level0", "aic_metrics": "memory"}, ["npu.aic_metrics"])],
)
def test_what_torch_npu_would_drop_is_named(make: Any, options: dict[str, Any], left_out: list[str]) -> None:
    assert record(make(npu=NpuOptions(**options)))["left_out"] == left_out


@pytest.mark.usefixtures("torch_npu")
def test_a_capture_is_a_folder_of_torch_npus_in_the_steps_folder(make: Any) -> None:
    run = make()
    meta = record(run)
    folder = folder_of(run)
    name = f"actor.update_actor.rank3.{rundir.HOST}.pid{os.getpid()}"
    assert folder.parent == run.rundir.step(2)
    assert folder.name.startswith(f"{name}_{os.getpid()}_")
    assert (folder / "ASCEND_PROFILER_OUTPUT" / "trace_view.json").exists()
    assert meta["bytes"] == sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) > 0
    assert list(run.rundir.parts()) == []
    (listed,) = listing.read(run.rundir.path).steps[0].captures
    assert (listed.name, listed.bytes, listed.state) == (name, meta["bytes"], "complete")


@pytest.mark.usefixtures("torch_npu")
def test_it_is_half_written_while_it_records(make: Any) -> None:
    run = make()
    recording = capture.begin(run, SUBJECT)
    (listed,) = listing.read(run.rundir.path).steps[0].captures
    assert (listed.name.split(".rank3")[0], listed.state) == ("actor.update_actor", listing.UNFINISHED)
    assert [path.parent.suffix for path in run.rundir.path.rglob("*_ascend_pt")] == [".part"]
    assert recording is not None
    capture.end(recording)
    ending.wait_for_files(run)


@pytest.mark.usefixtures("torch_npu")
@pytest.mark.parametrize(
    ("contents", "activities"),
    [
        ((), ["CPU", "NPU"]),
        (("npu",), ["NPU"]),
        (("cpu",), ["CPU"]),
        (("cuda",), ["CPU"]),
        (("stack",), ["CPU", "NPU"]),
    ],
)
def test_devices(make: Any, contents: tuple[str, ...], activities: list[str]) -> None:
    run = make(contents=contents)
    record(run)
    common, experimental = recorded(folder_of(run))
    assert common["activities"] == [f"ProfilerActivity.{name}" for name in activities]
    # Without the NPU torch_npu would only warn about it.
    assert (experimental is not None) == ("NPU" in activities)


def test_several_windows_in_one_process(make: Any, torch_npu: Any) -> None:
    run = make()
    for step in (2, 3):
        recording = capture.begin(run, Subject(step=step, role="ref", stage="compute_ref_log_prob", rank=0))
        assert recording is not None
        capture.end(recording)
    ending.wait_for_files(run)
    assert [len(list(run.rundir.step(step).glob("*_ascend_pt"))) for step in (2, 3)] == [1, 1]


def test_a_profiler_that_was_made_before_keeps_its_folder(make: Any, torch_npu: Any, tmp_path: Path) -> None:
    # As vllm-ascend makes one when its worker starts.
    profiler = torch_npu.profiler
    handler = profiler.tensorboard_trace_handler(str(tmp_path / "users"), "their-name")
    users = profiler.profile(activities=[profiler.ProfilerActivity.NPU], on_trace_ready=handler)
    record(make())
    with users:
        pass
    (folder,) = (tmp_path / "users").iterdir()
    assert folder.name.startswith("their-name_")


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("stop", "torch_npu did not finish it"),
        ("start", "torch_npu's profiler did not start"),
        ("init", "RuntimeError: aclInit failed"),
    ],
)
def test_what_torch_npu_swallows_is_noticed(
    make: Any, torch_npu: Any, monkeypatch: pytest.MonkeyPatch, fault: str, reason: str
) -> None:
    monkeypatch.setenv("TORCH_NPU_STAND_IN_FAULT", fault)
    run = make()
    if fault == "stop":
        record(run)
    else:
        with pytest.raises(RuntimeError):
            capture.begin(run, SUBJECT)
    meta = meta_file(run)
    assert meta["state"] == "failed"
    assert reason in meta["reason"]
    assert [path.name for path in run.rundir.step(2).iterdir() if not path.name.endswith(rundir.META)] == []


def test_a_recording_that_is_not_analysed_is_kept(make: Any, torch_npu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NPU_STAND_IN_FAULT", "analyse")
    run = make()
    meta = record(run)
    assert (meta["state"], meta["reason"]) == ("complete", "torch_npu has not analysed it")
    assert recorded(folder_of(run))


# The analysis, later.


def unanalysed(made: Any, *steps: int) -> Runtime:
    """A run with a recording in each of these steps, which nobody has analysed."""
    run: Runtime = made(npu=NpuOptions(analyse=False, export="db"))
    rundir.write_json(run.rundir.run_json, run.describe())
    for step in steps:
        recording = capture.begin(run, Subject(step=step, role="actor", stage="update_actor", rank=3))
        assert recording is not None
        capture.end(recording)
    ending.wait_for_files(run)
    return run


@pytest.mark.usefixtures("torch_npu")
def test_without_analyse_the_folder_is_named_and_left_as_it_is(make: Any) -> None:
    run = unanalysed(make, 2)
    meta = meta_file(run)
    assert (meta["state"], meta["reason"]) == ("complete", "torch_npu has not analysed it")
    assert not (folder_of(run) / "ASCEND_PROFILER_OUTPUT").exists()
    (note,) = [note for note in doctor_run.examine_run(listing.read(run.rundir.path)).notes if "analyse" in note]
    assert note.endswith("torch_npu has not analysed it; autoprof analyse has it do so")


@pytest.mark.usefixtures("torch_npu")
def test_autoprof_analyse(make: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run = unanalysed(make, 2, 3)
    path = str(run.rundir.path)
    # What an analysis that was ended has left.
    for folder in run.rundir.step(2).glob("*_ascend_pt"):
        (folder / "ASCEND_PROFILER_OUTPUT").mkdir()
    assert cli.main(["analyse", path, "--step", "2"]) == 0
    assert capsys.readouterr().out.startswith("global_step_000002/actor.update_actor.rank3.")
    states = {folder.parent.name: _finish.analysed(str(folder)) for folder in run.rundir.path.rglob("*_ascend_pt")}
    assert states == {"global_step_000002": True, "global_step_000003": False}
    (meta,) = run.rundir.step(2).glob("*.meta.json")
    content = json.loads(meta.read_text())
    (folder,) = run.rundir.step(2).glob("*_ascend_pt")
    assert (content["reason"], content["bytes"]) == ("", _finish.size(str(folder)))
    assert cli.main(["analyse", path]) == 0
    assert capsys.readouterr().out.count("analysed") == 1
    assert cli.main(["analyse", path]) == 0
    assert capsys.readouterr().out == "all is analysed\n"


def test_autoprof_analyse_says_what_is_wrong(
    make: Any, torch_npu: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = unanalysed(make, 2)
    path = str(run.rundir.path)
    monkeypatch.setenv("TORCH_NPU_STAND_IN_FAULT", "analyse")
    assert cli.main(["analyse", path]) == 1
    assert "torch_npu could not analyse it" in capsys.readouterr().out
    monkeypatch.delenv("PYTHONPATH")
    assert cli.main(["analyse", path]) == 1
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].endswith("ModuleNotFoundError: No module named 'torch_npu'")
    assert cli.main(["analyse", path, "--step", "9"]) == 1
    folder_of(run).rename(run.rundir.path / "elsewhere")
    assert cli.main(["analyse", path]) == 1
    assert "no folders of torch_npu's" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        cli.main(["analyse", path, "--step", "x"])
    assert stopped.value.code == 2


def test_an_analysis_that_hangs_is_ended(
    make: Any, torch_npu: Any, monkeypatch: pytest.MonkeyPatch, mocker: Any, tmp_path: Path
) -> None:
    # Finished in this process, with a Python that never ends in the place of the analysis.
    mocker.patch("autoprof.interpreter.find", side_effect=OSError)
    mocker.patch.multiple(_finish, _SIGN_OF_LIFE_S=0.05, _ANALYSE_TIMEOUT_S=0.1, _ANALYSE="while True: pass")
    real = _finish.finish
    mocker.patch.object(_finish, "finish", side_effect=lambda job: real(job | {"python": sys.executable}))
    assert record(make())["reason"] == "torch_npu has not analysed it"


def test_autoprof_yields_to_another_profiler_of_torch_npus(make: Any, torch_npu: Any, tmp_path: Path) -> None:
    capture.watch_others()
    profiler = torch_npu.profiler

    def users() -> Any:
        handler = profiler.tensorboard_trace_handler(str(tmp_path / "users"), analyse_flag=False)
        return profiler.profile(activities=[profiler.ProfilerActivity.CPU], on_trace_ready=handler)

    run = make()
    with users():
        assert capture.begin(run, SUBJECT) is None
    recording = capture.begin(run, SUBJECT)
    assert recording is not None
    with users():
        pass
    capture.end(recording)
    meta = meta_file(run)
    assert (meta["state"], meta["reason"]) == ("truncated", "another torch_npu.profiler was started in this process")
    assert len(list((tmp_path / "users").iterdir())) == 2


def test_autoprof_yields_to_verls_own_npu_profiler(python: Any, tmp_path: Path) -> None:
    code = """
from verl.utils.profiler import ProfilerConfig
from verl.utils.profiler.config import NPUToolConfig
from verl.utils.profiler.mstx_profile import NPUProfiler
from autoprof import capture, runtime
from autoprof.naming import Subject
run = runtime.start()
capture.watch_others()
tool = NPUToolConfig(contents=["npu"], level="level1", analysis=False, discrete=True)
theirs = NPUProfiler(rank=0, config=ProfilerConfig(save_path="verls"), tool_config=tool)
recording = capture.begin(run, Subject(step=2, role="actor", stage="update_actor", rank=3))
assert recording.tool.name == "npu"
theirs.annotate(role="actor_update")(lambda: print("called"))()
capture.end(recording)
"""
    here = {"PYTHONPATH": str(npu_stand_in.STAND_INS), "TORCH_NPU_STAND_IN": RELEASES[-1]}
    on = {"AUTOPROF": "1", "AUTOPROF_RUN_ID": "run"}
    result = python(code, **here, **on)
    assert result.stdout.count("called") == 1
    (verls,) = (tmp_path / "verls" / "actor_update").iterdir()
    assert recorded(verls)[1]["mstx_domain_exclude"] == ["communication"]
    folder = tmp_path / "autoprof_runs" / "run" / "global_step_000002"
    deadline = time.monotonic() + 60
    while (list(folder.glob("*.part")) or not list(folder.glob("*.meta.json"))) and time.monotonic() < deadline:
        time.sleep(0.05)
    (meta,) = folder.glob("*.meta.json")
    assert json.loads(meta.read_text())["reason"] == "another torch_npu.profiler was started in this process"


@pytest.mark.usefixtures("torch_npu")
@pytest.mark.parametrize("variable", ["MSMONITOR_USE_DAEMON", "PROF_CONFIG_PATH"])
def test_nothing_is_recorded_where_torch_npu_profiles_by_itself(
    make: Any, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "1")
    assert variable in NpuTool().busy()
    assert capture.begin(make(), SUBJECT) is None
    monkeypatch.setenv(variable, "0")
    assert NpuTool().busy() == ""


# Which tool.


@pytest.mark.parametrize("asked", [(), ("npu",), ("npu", "torch"), ("torch",), ("torch", "npu")])
def test_the_tool_where_npus_are_used(torch_npu: Any, asked: tuple[str, ...]) -> None:
    assert isinstance(tools.choose(Settings(tool=asked)), NpuTool if asked[:1] != ("torch",) else TorchTool)


def test_a_process_that_uses_no_npu_takes_torchs(
    torch_npu: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCH_NPU_STAND_IN_IDLE", "1")
    assert isinstance(tools.choose(Settings(tool=())), TorchTool)
    assert isinstance(tools.choose(Settings(tool=("npu", "torch"))), TorchTool)
    assert caplog.text == ""
    assert isinstance(tools.choose(Settings(tool=("npu",))), TorchTool)
    tools.choose(Settings(tool=("npu",)))
    assert caplog.text.count("AUTOPROF_TOOL=npu: this process uses no NPU; torch.profiler records instead") == 1


def test_torchs_profiler_leaves_the_npu_alone(torch_npu: Any, mocker: Any) -> None:
    kinds = torch.profiler.ProfilerActivity
    mocker.patch("torch.profiler.supported_activities", return_value={kinds.CPU, kinds.PrivateUse1})
    assert profile_arguments(())[1] == profile_arguments(("cpu", "npu"))[1] == ["cpu"]
    npu_stand_in.remove()
    assert profile_arguments(())[1] == ["cpu", "npu"]


def test_without_torch_npu_nothing_of_it_is_imported(make: Any) -> None:
    assert isinstance(tools.choose(Settings(tool=())), TorchTool)
    assert tools.outlook(()) == "torch (no AUTOPROF_TOOL; torch_npu is not installed)"
    assert tools.outlook(("torch",)) == "torch (AUTOPROF_TOOL)"


def test_doctor_says_which_tool_applies(make: Any, python: Any, tmp_path: Path) -> None:
    code = "from autoprof import tools; print(tools.outlook(()))"
    path = {"PYTHONPATH": str(npu_stand_in.STAND_INS), "TORCH_NPU_STAND_IN": RELEASES[-1]}
    assert python(code, **path).stdout.strip() == "npu in processes that use an NPU, torch in others (no AUTOPROF_TOOL)"
    broken = tmp_path / "site" / "torch_npu"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('libascendcl.so: cannot open shared object file')")
    said = python(code, PYTHONPATH=str(broken.parent)).stdout
    assert "importing torch_npu raised ImportError: libascendcl.so" in said


# The stand-in, against what is stored of the real releases.


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
    # What the detached process calls.
    assert {"profiler_path", "max_process_number"} <= set(stored.parameters(contract.find(_HERE, "analyse")))
