"""The tool `npu`, with a stand-in that has the parameters of five releases of torch_npu and writes the same files."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from autoprof.base import identity
from autoprof.capture import recorder
from autoprof.capture.artifacts import Subject
from autoprof.capture.profilers.npu import experimental_config
from autoprof.config.values import NpuOptions
from autoprof.run import end
from autoprof.rundir import file_names, runs
from autoprof.rundir.runs import UNFINISHED
from tests.support import npu_stand_in
from tests.support.captures import SUBJECT, begun
from tests.support.npu_records import folder_of, meta_file, record, recorded
from tests.support.npu_stand_in import RELEASES


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
    # The older parameters, without lists and without the cache (experimental_config.py before 2.5).
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
    said = "npu does not support these options here, so they are left out: npu.aic_metrics, npu.export, npu.l2_cache"
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
    name = f"actor.update_actor.rank3.{identity.HOST}.pid{os.getpid()}"
    assert folder.parent == run.rundir.step(2)
    assert folder.name.startswith(f"{name}_{os.getpid()}_")
    assert (folder / "ASCEND_PROFILER_OUTPUT" / "trace_view.json").exists()
    assert meta["bytes"] == sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) > 0
    assert list(run.rundir.parts()) == []
    (listed,) = runs.read(run.rundir.path).steps[0].captures
    assert (listed.name, listed.bytes, listed.state) == (name, meta["bytes"], "complete")


@pytest.mark.usefixtures("torch_npu")
def test_it_is_half_written_while_it_records(make: Any) -> None:
    run = make()
    recording = recorder.begin(run, SUBJECT)
    (listed,) = runs.read(run.rundir.path).steps[0].captures
    assert (listed.name.split(".rank3")[0], listed.state) == ("actor.update_actor", UNFINISHED)
    assert [path.parent.suffix for path in run.rundir.path.rglob("*_ascend_pt")] == [".part"]
    assert recording is not None
    recording.stop()
    end.wait_for_files(run)


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
    # Without the NPU, torch_npu would only warn about the config.
    assert (experimental is not None) == ("NPU" in activities)


def test_several_windows_in_one_process(make: Any, torch_npu: Any) -> None:
    run = make()
    for step in (2, 3):
        begun(run, Subject(step=step, role="ref", stage="compute_ref_log_prob", rank=0)).stop()
    end.wait_for_files(run)
    assert [len(list(run.rundir.step(step).glob("*_ascend_pt"))) for step in (2, 3)] == [1, 1]


def test_a_profiler_that_was_made_before_keeps_its_folder(make: Any, torch_npu: Any, tmp_path: Path) -> None:
    # vllm-ascend makes such a profiler when its worker starts.
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
            recorder.begin(run, SUBJECT)
    meta = meta_file(run)
    assert meta["state"] == "failed"
    assert reason in meta["reason"]
    assert [path.name for path in run.rundir.step(2).iterdir() if not path.name.endswith(file_names.META)] == []


def test_a_recording_that_is_not_analysed_is_kept(make: Any, torch_npu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NPU_STAND_IN_FAULT", "analyse")
    run = make()
    meta = record(run)
    assert (meta["state"], meta["reason"]) == ("complete", "torch_npu has not analysed it")
    assert recorded(folder_of(run))
