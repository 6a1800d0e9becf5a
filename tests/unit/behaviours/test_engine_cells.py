"""Engines by device, contents and ranks, in the step that was asked for: what a worker leaves in each of these cells.

There is neither a GPU nor an NPU here. torch takes CUDA's activity and leaves it out, as it does where no device is to
be seen; torch_npu has a stand-in. The engines are imitated, as in test_vllm_worker.py and test_sglang_scheduler.py.
"""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from autoprof.behaviours import sglang, vllm_worker
from autoprof.behaviours.rollout import Request
from autoprof.behaviours.vllm_worker import Worker
from autoprof.config.selection import Steps
from autoprof.run import end
from autoprof.run.runtime import Runtime
from autoprof.rundir import file_names
from tests.support import allocators, npu_stand_in
from tests.support.sglang_schedulers import Scheduler, send
from tests.support.sglang_schedulers import passes as schedule
from tests.support.vllm_workers import V032, Ascend23, passes

RANKS = 2
DEVICES = ("gpu", "npu")
CONTENTS = ((), ("stack", "shapes"))
ASKED_RANKS = ("1", "all")

# Has the engine of a replica with two ranks generate in a step, recorded if the step is captured.
Generate = Callable[[Runtime, str, int, bool], None]


def vllm_generates(run: Runtime, device: str, step: int, captured: bool) -> None:
    for rank in range(RANKS):
        worker = V032() if device == "gpu" else Ascend23()
        worker.rank = rank
        if captured:
            asked = {"action": "start", "global_step": step, "replica": 0, "rank": 0}
            assert worker.autoprof_prepare(asked) == {"problem": ""}
            worker.profile(True)
        passes(worker, 2)
        if captured:
            worker.profile(False)
            assert worker.autoprof_release() == {"problem": ""}


def sglang_generates(run: Runtime, device: str, step: int, captured: bool) -> None:
    for rank in range(RANKS):
        scheduler = Scheduler(tp_rank=rank)
        if captured:
            assert send(scheduler, Request(action="start", step=step)) == ""
        schedule(scheduler, "EXTEND", "DECODE")
        if captured:
            assert send(scheduler, Request(action="stop")) == ""


ENGINES: dict[str, Generate] = {"vllm": vllm_generates, "sglang": sglang_generates}


@pytest.fixture
def start(joined: Callable[..., Runtime], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes this process part of a run on a machine with such devices."""

    def make(device: str, **settings: Any) -> Runtime:
        if device == "npu":
            npu_stand_in.install(monkeypatch)
        else:
            activities = {torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA}
            monkeypatch.setattr(torch.profiler, "supported_activities", lambda: activities)
        return joined(**settings)

    monkeypatch.setattr(vllm_worker, "_rank_part", lambda worker: f"rank{worker.rank}")
    monkeypatch.setattr(sglang, "_answer", lambda message: message)
    for worker in (V032, Ascend23):
        Worker().install(worker)
    yield make
    npu_stand_in.remove()


@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.parametrize(
    ("engine", "device", "contents", "ranks"),
    [
        pytest.param(*cell, id=f"{cell[0]}-{cell[1]}-{'+'.join(cell[2]) or 'plain'}-rank_{cell[3]}")
        for cell in itertools.product(ENGINES, DEVICES, CONTENTS, ASKED_RANKS)
    ],
)
def test_each_cell(start: Any, engine: str, device: str, contents: tuple[str, ...], ranks: str) -> None:
    run = start(device, steps="2", contents=contents, ranks=ranks)
    for step in (1, 2, 3):
        ENGINES[engine](run, device, step, Steps.parse(run.settings.steps).matches(step, step))
    end.wait_for_files(run)
    assert [path.name for path in run.rundir.steps()] == ["global_step_000002"]
    assert list(run.rundir.parts()) == []
    found = {meta["rank"]: (path, meta) for path, meta in metas(run)}
    assert set(found) == ({1} if ranks == "1" else {0, 1})
    for path, meta in found.values():
        assert (meta["step"], meta["role"], meta["stage"], meta["replica"]) == (2, "rollout", "rollout", 0)
        assert (meta["state"], meta["reason"], meta["left_out"]) == ("complete", "", [])
        assert meta["tool"] == ("torch" if device == "gpu" else "npu")
        assert meta["contents"] == ["cpu", "cuda" if device == "gpu" else "npu", *contents]
        assert meta["bytes"] > 0
        assert recorded(path, device) == set(contents)


@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_snapshot_of_the_memory_lies_beside_each_workers_trace(
    start: Any, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    run = start("gpu", steps="2", tool=("torch", "memory"), ranks="all")
    allocator = allocators.install(monkeypatch, allocators.Allocator())
    ENGINES[engine](run, "gpu", 2, True)
    end.wait_for_files(run)
    assert sorted((meta["rank"], meta["tool"], meta["state"]) for _, meta in metas(run)) == [
        (0, "memory", "complete"),
        (0, "torch", "complete"),
        (1, "memory", "complete"),
        (1, "torch", "complete"),
    ]
    assert len(list(run.rundir.step(2).glob("*.memory.pickle"))) == RANKS
    assert not allocator.enabled


def metas(run: Runtime) -> Iterator[tuple[Path, dict[str, Any]]]:
    for path in run.rundir.step(2).glob("*.meta.json"):
        yield path, json.loads(path.read_text())


def recorded(meta: Path, device: str) -> set[str]:
    """Return which of stacks and shapes are in the trace beside a meta file."""
    if device == "npu":
        (info,) = meta.parent.glob(f"{meta.name.removesuffix(file_names.META)}_*_ascend_pt/profiler_info*.json")
        config = json.loads(info.read_text())["config"]["common_config"]
        return {word for word, name in (("stack", "with_stack"), ("shapes", "record_shapes")) if config[name]}
    trace = meta.with_name(meta.name.removesuffix(file_names.META) + file_names.TRACE)
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert [event["name"] for event in events].count("work") == 2
    seen = {"stack": any(event.get("cat") == "python_function" for event in events)}
    seen["shapes"] = any("Input Dims" in event.get("args", {}) for event in events)
    return {word for word, there in seen.items() if there}
