"""The tool `memory`, with a stand-in for CUDA's allocator whose functions have torch's parameters."""

from __future__ import annotations

import inspect
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.cuda.memory

from autoprof.base import identity
from autoprof.capture import profilers, recorder
from autoprof.capture.artifacts import Subject
from autoprof.capture.profilers import memory
from autoprof.capture.profilers.memory import MemoryTool
from autoprof.capture.profilers.torch import TorchTool
from autoprof.cli import doctor as doctor_run
from autoprof.config.settings import Settings
from autoprof.config.values import MemoryOptions
from autoprof.run.runtime import Runtime
from autoprof.rundir import file_names, runs
from autoprof.rundir.runs import UNFINISHED
from autoprof.traces import merge_step
from tests.support.allocators import REAL, Allocator, install
from tests.support.captures import SUBJECT, begun, finished, work
from tests.support.helpers import TORCH


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    return install(monkeypatch, Allocator())


def snapshots(run: Runtime) -> dict[str, dict[str, Any]]:
    return {path.name: pickle.loads(path.read_bytes()) for path in run.rundir.path.rglob("*.pickle")}


def name_of(ending: str) -> str:
    return f"actor.update_actor.rank3.{identity.HOST}.pid{os.getpid()}{ending}"


def test_a_snapshot_lies_beside_the_trace(made: Any, allocator: Allocator) -> None:
    run = made(tool=("torch", "memory"), contents=("cpu", "shapes"))
    allocator.allocate("before")
    recording = begun(run)
    assert recording.tool.name == "torch"
    work()
    allocator.allocate("inside")
    recording.stop()
    allocator.allocate("after")
    found = finished(run)
    assert {name: meta["tool"] for name, (meta, _) in found.items()} == {
        name_of(""): "torch",
        name_of(".memory"): "memory",
    }
    meta = found[name_of(".memory")][0]
    assert (meta["state"], meta["reason"], meta["contents"], meta["left_out"]) == ("complete", "", ["memory"], [])
    assert (meta["step"], meta["role"], meta["rank"]) == (2, "actor", 3)
    ((name, snapshot),) = snapshots(run).items()
    assert name == name_of(".memory.pickle")
    assert snapshot["device_traces"] == [["inside"]]
    assert (snapshot["autoprof"]["global_step"], snapshot["autoprof"]["stage"]) == (2, "update_actor")
    assert meta["bytes"] == (run.rundir.step(2) / name).stat().st_size
    assert not allocator.enabled
    assert list(run.rundir.parts()) == []


def test_a_snapshot_is_a_capture_and_no_trace(made: Any, allocator: Allocator) -> None:
    run = made(tool=("torch", "memory"))
    recording = recorder.begin(run, SUBJECT)
    assert {each.state for each in runs.read(run.rundir.path).steps[0].captures} <= {UNFINISHED}
    recording.stop()
    finished(run)
    step = runs.read(run.rundir.path).steps[0]
    assert [(each.name, each.state) for each in step.captures] == [
        (name_of(""), "complete"),
        (name_of(".memory"), "complete"),
    ]
    assert all(each.bytes == each.meta.bytes > 0 for each in step.captures)
    (taken,) = merge_step.traces_of_step(run.rundir.step(2), step.captures)
    assert taken.path.name == name_of(file_names.TRACE)


def test_alone_it_has_the_same_name(made: Any, allocator: Allocator) -> None:
    run = made(tool=("memory",), contents=("memory", "stack"))
    recording = begun(run)
    assert recording.tool.name == "memory"
    recording.stop()
    ((name, (meta, trace)),) = finished(run).items()
    assert (name, trace) == (name_of(".memory"), None)
    assert (meta["state"], meta["contents"], meta["left_out"]) == ("complete", ["memory"], ["stack"])
    assert list(snapshots(run)) == [name_of(".memory.pickle")]


def test_several_windows_in_one_process(made: Any, allocator: Allocator) -> None:
    run = made(tool=("torch", "memory"))
    for step in (2, 3):
        recording = recorder.begin(run, Subject(step=step, role="ref", stage="compute_ref_log_prob", rank=0))
        assert recorder.begin(run, SUBJECT) is None
        allocator.allocate(f"in {step}")
        recording.stop()
    finished(run)
    paths = sorted(run.rundir.path.rglob("*.memory.pickle"))
    assert [pickle.loads(path.read_bytes())["device_traces"] for path in paths] == [[["in 2"]], [["in 3"]]]


def test_a_stage_that_raises_leaves_a_truncated_snapshot(made: Any, allocator: Allocator) -> None:
    run = made(tool=("torch", "memory"))
    recording = recorder.begin(run, SUBJECT)
    recording.abort("the stage raised OutOfMemoryError")
    meta = finished(run)[name_of(".memory")][0]
    assert (meta["state"], meta["reason"]) == ("truncated", "the stage raised OutOfMemoryError")


# Arguments of torch's function.


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({}, {"context": "all", "stacks": "python", "max_entries": 100_000}),
        ({"stacks": "all", "max_entries": 7}, {"context": "all", "stacks": "all", "max_entries": 7}),
        ({"stacks": "none"}, {"context": None, "stacks": "python", "max_entries": 100_000}),
    ],
)
def test_options(allocator: Allocator, options: dict[str, Any], asked: dict[str, Any]) -> None:
    MemoryTool().start(Settings(memory=MemoryOptions(**options)), Path("x"))
    taken = {name: value for name, value in allocator.arguments.items() if value != REAL.parameters[name].default}
    assert taken == {name: value for name, value in asked.items() if value != REAL.parameters[name].default}
    assert set(asked) <= set(REAL.parameters)


def test_a_torch_that_knows_less_is_asked_for_less(monkeypatch: pytest.MonkeyPatch) -> None:
    later = ("clear_history", "compile_context", "global_record_annotations", "skip_actions", "stacks")
    allocator = install(monkeypatch, Allocator(without=later))
    tool = MemoryTool()
    tool.start(Settings(), Path("x"))
    assert allocator.arguments["max_entries"] == 100_000
    tool.stop()
    assert not allocator.enabled


def test_a_history_without_bounds_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = install(monkeypatch, Allocator(without=("max_entries",)))
    with pytest.raises(RuntimeError, match="can't bound"):
        MemoryTool().start(Settings(), Path("x"))
    assert not allocator.enabled


def test_torch_has_what_is_called_of_it() -> None:
    assert {"enabled", "context", "stacks", "max_entries"} <= set(REAL.parameters)
    inspect.signature(torch.cuda.memory._snapshot).bind()
    inspect.signature(torch.cuda._lazy_call).bind(print)
    # Only builds with CUDA have it; others declare it in their type stubs.
    stubs = Path(torch.__file__).with_name("_C") / "__init__.pyi"
    assert "def _cuda_isHistoryEnabled() -> _bool" in stubs.read_text()


# Other users of the history, and faults.


def test_a_history_of_the_users_is_left_alone(made: Any, allocator: Allocator) -> None:
    torch.cuda.memory._record_memory_history(max_entries=5)
    allocator.allocate("theirs")
    run = made(tool=("torch", "memory"))
    recorder.begin(run, SUBJECT).stop()
    found = finished(run)
    assert found[name_of("")][0]["state"] == "complete"
    meta = found[name_of(".memory")][0]
    assert meta["state"] == "failed"
    assert "other code records the memory history" in meta["reason"]
    assert (allocator.arguments["max_entries"], allocator.events) == (5, ["theirs"])
    assert recorder.begin(made(tool=("memory",)), SUBJECT) is None


@pytest.mark.parametrize("enabled", ["all", None])
def test_a_history_that_the_user_switches_meanwhile(made: Any, allocator: Allocator, enabled: str | None) -> None:
    run = made(tool=("torch", "memory"))
    recording = recorder.begin(run, SUBJECT)
    torch.cuda.memory._record_memory_history(enabled)
    recording.stop()
    meta = finished(run)[name_of(".memory")][0]
    assert (meta["state"], "switched the memory history" in meta["reason"]) == ("failed", True)
    assert allocator.enabled == (enabled == "all")
    assert snapshots(run) == {}
    torch.cuda.memory._record_memory_history(None)
    later = recorder.begin(run, SUBJECT)
    later.stop()
    assert finished(run)[name_of(".memory").replace("update_actor", "update_actor.2")][0]["state"] == "complete"


@pytest.mark.parametrize("fault", ["record", "snapshot"])
def test_what_torch_refuses_costs_the_snapshot_only(made: Any, allocator: Allocator, fault: str) -> None:
    run = made(tool=("torch", "memory"))
    allocator.refuses = fault
    begun(run).stop()
    found = finished(run)
    assert found[name_of("")][0]["state"] == "complete"
    meta = found[name_of(".memory")][0]
    assert (meta["state"], "RuntimeError" in meta["reason"]) == ("failed", True)
    assert not allocator.enabled
    assert list(run.rundir.parts()) == []


def test_a_full_disk_costs_the_snapshot_only(made: Any, allocator: Allocator, mocker: Any) -> None:
    mocker.patch("autoprof.capture.profilers.memory.pickle.dump", side_effect=OSError(28, "No space left on device"))
    run = made(tool=("torch", "memory"))
    recorder.begin(run, SUBJECT).stop()
    found = finished(run)
    assert found[name_of("")][0]["state"] == "complete"
    assert "No space left" in found[name_of(".memory")][0]["reason"]
    assert list(run.rundir.path.rglob("*.pickle*")) == []


def test_a_process_without_cuda_records_none(made: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert MemoryTool.unavailable() == "this process uses no CUDA"
    both, alone = Settings(tool=("torch", "memory")), Settings(tool=("memory",))
    assert profilers.beside(both, profilers.choose(both)) == []
    assert caplog.text == ""
    assert isinstance(profilers.choose(alone), TorchTool)
    profilers.choose(alone)
    assert caplog.text.count("AUTOPROF_TOOL=memory: this process uses no CUDA; torch.profiler records instead") == 1


# Out of memory.


def test_running_out_of_memory_leaves_a_snapshot(made: Any, allocator: Allocator, monkeypatch: Any) -> None:
    run = made(memory=MemoryOptions(oom=True, max_entries=9))
    queued: list[Callable[[], None]] = []
    monkeypatch.setattr(torch.cuda, "_lazy_call", queued.append)
    memory.watch_out_of_memory(run, recorder.subject)
    assert not allocator.enabled
    queued[0]()
    assert allocator.arguments["max_entries"] == 9
    allocator.allocate("weights")
    with pytest.raises(torch.cuda.OutOfMemoryError):
        allocator.run_out()
    folder = run.rundir.path / "oom"
    base = f"{identity.HOST}.pid{os.getpid()}"
    assert sorted(path.name for path in folder.iterdir()) == [f"{base}.meta.json", f"{base}.pickle"]
    assert pickle.loads((folder / f"{base}.pickle").read_bytes())["device_traces"] == [["weights"]]
    meta = json.loads((folder / f"{base}.meta.json").read_text())
    assert (meta["device"], meta["asked_bytes"], meta["free_bytes"]) == (0, 1 << 30, 5)
    assert meta["state"] == "complete"
    assert "step" not in meta
    report = doctor_run.examine_run(runs.read(run.rundir.path))
    assert f"oom/{base}.pickle: CUDA ran out of memory with 1.07 GB requested, 5 B free" in report.notes


def test_it_says_in_which_stage_and_how_often_is_bounded(made: Any, allocator: Allocator) -> None:
    run = made(tool=("torch", "memory"), memory=MemoryOptions(oom=True))
    memory.watch_out_of_memory(run, recorder.subject)
    allocator.allocate("before")
    recording = recorder.begin(run, SUBJECT)
    allocator.allocate("inside")
    for _ in range(memory.MAX_SNAPSHOTS + 2):
        with pytest.raises(torch.cuda.OutOfMemoryError):
            allocator.run_out()
    recording.stop()
    finished(run)
    found = sorted((run.rundir.path / "oom").glob("*.meta.json"))
    assert len(found) == memory.MAX_SNAPSHOTS
    assert json.loads(found[0].read_text())["stage"] == "update_actor"
    # The history of the window, and the one outside of windows.
    assert snapshots(run)[name_of(".memory.pickle")]["device_traces"] == [["inside"]]
    assert allocator.enabled
    assert memory.foreign_history() == ""


def test_what_goes_wrong_then_is_noted_and_goes_no_further(made: Any, allocator: Allocator, mocker: Any) -> None:
    run = made(memory=MemoryOptions(oom=True))
    report = mocker.patch("autoprof.run.runtime.report")
    memory.watch_out_of_memory(run, recorder.subject)
    allocator.refuses = "snapshot"
    with pytest.raises(torch.cuda.OutOfMemoryError):
        allocator.run_out()
    assert report.call_args.args[0] == "memory/oom"
    assert list(run.rundir.path.rglob("*.pickle*")) == []


def test_a_torch_that_can_not_be_watched_is_left_alone(made: Any, allocator: Allocator, mocker: Any) -> None:
    mocker.patch.object(torch._C, "_cuda_attach_out_of_memory_observer", side_effect=RuntimeError("no"))
    report = mocker.patch("autoprof.run.runtime.report")
    memory.watch_out_of_memory(made(memory=MemoryOptions(oom=True)), recorder.subject)
    assert report.call_count == 1


def test_a_run_watches_where_it_is_asked_to(python: Any) -> None:
    code = f"""
from autoprof import agent
agent.join()
{TORCH}
queued = [call.__module__ for call, _ in torch.cuda._queued_calls]
print("autoprof.capture.profilers.memory" in queued, torch.cuda.is_initialized())
"""
    on = {"AUTOPROF": "1", "AUTOPROF_RUN_ID": "run"}
    assert python(code, **on, AUTOPROF_MEMORY="oom=true").stdout.split() == ["True", "False"]
    assert python(code, **on).stdout.split() == ["False", "False"]
