"""Nsight Systems without a GPU: the processes that record with it, and the calls of a window."""

from __future__ import annotations

import json
from typing import Any

import pytest

from autoprof.capture import finisher, profilers, recorder, whole_step
from autoprof.capture.artifacts import Subject
from autoprof.capture.profilers import nsys
from autoprof.capture.profilers.memory import MemoryTool
from autoprof.capture.profilers.nsys import NsysTool
from autoprof.capture.profilers.torch import TorchTool
from autoprof.config.settings import Settings
from tests.support.captures import begun
from tests.support.nsys_runs import NSYS, SUBJECT, finished, record


@pytest.mark.needs("torch")
def test_a_process_under_nsys_uses_nothing_else(under_nsys: None) -> None:
    for asked in [(), ("torch",), ("npu", "torch"), ("nsys",), ("torch", "nsys"), ("nsys", "memory")]:
        assert isinstance(profilers.choose(Settings(tool=asked)), NsysTool), asked


def test_nobodys_session_is_disturbed(made: Any, cuda: list[str], under_nsys: None, mocker: Any) -> None:
    """The user runs this process under nsys, and `AUTOPROF_TOOL` does not name nsys."""
    warning = mocker.patch("autoprof.base.log.warning_once")
    assert recorder.begin(made(tool=("torch",)), SUBJECT) is None
    assert cuda == []
    assert "this process runs under nsys, which has CUPTI" in warning.call_args.args[0]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NSYS_PROFILING_SESSION_ID", "1"),
        (nsys.REPORT, "autoprof_%p"),
        ("LD_PRELOAD", "/opt/nvidia/nsight-systems/target-linux-x64/libToolsInjectionProxy64.so"),
        ("CUDA_INJECTION64_PATH", "/opt/nvidia/target-linux-x64/libToolsInjection64.so"),
    ],
)
def test_how_a_process_knows(name: str, value: str) -> None:
    assert nsys.runs_under_nsys({name: value})
    assert not nsys.runs_under_nsys({"LD_PRELOAD": "/usr/lib/libjemalloc.so"})


@pytest.mark.needs("torch")
def test_elsewhere_torch_records_and_it_is_said_once(mocker: Any) -> None:
    warning = mocker.patch("autoprof.base.log.warning_once")
    assert isinstance(profilers.choose(NSYS), TorchTool)
    assert "this process does not run under nsys; torch.profiler records instead" in warning.call_args.args[0]


@pytest.mark.needs("torch")
def test_the_memory_history_alone_stays_so(under_nsys: None, mocker: Any) -> None:
    mocker.patch.object(MemoryTool, "unavailable", return_value="")
    assert isinstance(profilers.choose(Settings(tool=("memory",))), MemoryTool)


def test_a_window_in_calls(made: Any, cuda: list[str], under_nsys: None) -> None:
    run = made(tool=("nsys",), contents=("cpu", "cuda", "shapes"))
    record(run)
    start, mark, begin, end, synchronize, stop = cuda
    assert [start, begin, end, synchronize, stop] == [
        "start",
        "range step 2 actor.update_actor",
        "end 7",
        "synchronize",
        "stop",
    ]
    stamp = json.loads(mark.removeprefix("mark "))["autoprof"]
    assert (stamp["global_step"], stamp["role"], stamp["stage"], stamp["rank"]) == (2, "actor", "update_actor", 3)


def test_ranges_in_the_window_of_a_whole_step(made: Any, cuda: list[str], under_nsys: None) -> None:
    run = made(tool=("nsys",), mode="continuous")
    for stage in ("compute_log_prob", "update_actor"):
        leave = whole_step.enter(run, Subject(step=2, role="actor", stage=stage, rank=3), run.settings)
        assert leave is not None
        leave("")
    whole_step.stop()
    ranges = [call for call in cuda if call.startswith("range")]
    assert ranges == ["range global_step 2", "range actor.compute_log_prob", "range actor.update_actor"]
    assert (cuda[0], cuda[-1], cuda.count("start")) == ("start", "stop", 1)


def test_ranges_inside_of_a_stage_have_their_own_names(made: Any, cuda: list[str], under_nsys: None) -> None:
    recording = begun(made(tool=("nsys",)))
    recording.mark("mini_batch 0")()
    recording.stop()
    assert [call for call in cuda if call.startswith("range")] == [
        "range step 2 actor.update_actor",
        "range mini_batch 0",
    ]


def test_the_report_of_the_users_own_command_stays_where_it_is(made: Any, cuda: list[str], under_nsys: None) -> None:
    run = made(tool=("nsys",))
    record(run)
    (meta,) = finished(run).values()
    assert (meta["tool"], meta["state"], meta["reason"]) == ("nsys", "complete", finisher.OWN_COMMAND)
    assert [path.name for path in run.rundir.step(2).iterdir() if "meta" not in path.name] == []


def test_without_cuda_a_meta_file_says_so(made: Any, under_nsys: None) -> None:
    run = made(tool=("nsys",))
    with pytest.raises(RuntimeError, match="CUDA is not initialised"):
        recorder.begin(run, SUBJECT)
    (meta,) = finished(run).values()
    assert meta["state"] == "failed"
    assert "CUDA is not initialised in this process" in meta["reason"]


def test_without_nvtx_windows_are_recorded_all_the_same(
    made: Any, cuda: list[str], under_nsys: None, mocker: Any
) -> None:
    for name in ("mark", "range_start"):
        mocker.patch(f"torch.cuda.nvtx.{name}", side_effect=RuntimeError("NVTX functions not installed"))
    record(made(tool=("nsys",)))
    assert cuda == ["start", "synchronize", "stop"]


def test_a_window_is_closed_though_the_device_failed(made: Any, cuda: list[str], under_nsys: None, mocker: Any) -> None:
    mocker.patch("torch.cuda.synchronize", side_effect=RuntimeError("an illegal memory access"))
    recording = recorder.begin(made(tool=("nsys",)), SUBJECT)
    with pytest.raises(RuntimeError):
        recording.stop()
    assert cuda[-1] == "stop"


def test_a_child_of_an_actor_under_nsys_records_nothing(made: Any, cuda: list[str], monkeypatch: Any) -> None:
    monkeypatch.setenv(nsys.REPORT, "autoprof_%p")
    assert recorder.begin(made(tool=("nsys",)), SUBJECT) is None
    assert cuda == []
