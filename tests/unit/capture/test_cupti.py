"""Traces without GPU events: detection, explanation and prevention."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from autoprof.capture import finisher
from autoprof.capture.profilers import foreign
from autoprof.cli import doctor as doctor_run
from autoprof.rundir import file_names, layout, runs
from tests.support.captures import captured, job

KERNEL = '{\n    "ph": "X", "cat": "kernel", "name": "gemm"\n  }'
HOST = '{\n    "ph": "X", "cat": "cpu_op", "name": "\\"cat\\": \\"kernel\\""\n  }'


@pytest.fixture(autouse=True)
def _nothing_in_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NVTX_INJECTION64_PATH", "CUDA_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID", "KINETO_USE_DAEMON"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    activities = {torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA}
    monkeypatch.setattr(torch.profiler, "supported_activities", lambda: activities)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)


@pytest.mark.usefixtures("gpu")
@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_a_trace_without_a_gpus_work_says_so(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_INJECTION64_PATH", "/opt/libdcgm.so")
    run = made()
    meta, _ = captured(run)
    assert (meta["state"], meta["reason"], meta["device_events"]) == ("complete", "", False)
    assert "loads libdcgm.so" in meta["device_reason"]
    notes, (problem,) = doctor_run.devices(runs.read(run.rundir.path))
    assert notes == []
    assert problem.startswith("step 2, actor.update_actor.rank3.")
    assert problem.endswith(f"the trace has no GPU activity: {meta['device_reason']}")


@pytest.mark.usefixtures("gpu")
@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.parametrize("contents", [("cpu",), ("cpu", "stack")])
def test_a_trace_that_was_to_hold_none_says_nothing(made: Any, contents: tuple[str, ...]) -> None:
    assert "device_events" not in captured(made(contents=contents))[0]


def test_a_process_that_uses_no_gpu_says_nothing(made: Any) -> None:
    assert "device_events" not in captured(made())[0]


@pytest.mark.parametrize("piece", [1, 7, 64, 1 << 20])
@pytest.mark.parametrize(
    ("events", "there"),
    [
        ([HOST], False),
        ([HOST, KERNEL], True),
        ([HOST] * 30 + [KERNEL.replace("kernel", "gpu_memcpy")], True),
        ([KERNEL.replace("kernel", "gpu_memset"), HOST], True),
        ([KERNEL.replace("kernel", "cuda_runtime")], False),
    ],
)
def test_they_are_found_wherever_the_pieces_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int, events: list[str], there: bool
) -> None:
    monkeypatch.setattr(finisher, "_PIECE", piece)
    raw = tmp_path / "raw"
    raw.write_text('{"traceEvents": [\n  ' + ",\n  ".join(events) + "\n  ]}")
    assert finisher.device_events(str(raw)) == there


def test_a_trace_that_is_cut_is_looked_at_whole(tmp_path: Path) -> None:
    trace = '{\n  "traceEvents": [\n  ' + ",\n  ".join([HOST] * 200 + [KERNEL]) + "\n  ]}"
    finisher.finish(job(tmp_path, trace, suspicion="why"))
    meta = json.loads((tmp_path / "x.meta.json").read_text())
    assert (meta["state"], meta["device_events"], meta.get("device_reason")) == ("truncated", True, None)


def test_a_stage_of_a_process_whose_other_traces_have_it_is_no_problem(made: Any) -> None:
    run = made()
    folder = run.rundir.step(2)
    for name, there, pid in (("a", True, 1), ("b", False, 1), ("c", False, 2)):
        meta = {"state": "complete", "host": "h", "pid": pid, "device_events": there, "device_reason": "why"}
        layout.write_json(folder / f"{name}{file_names.META}", meta)
        (folder / f"{name}{file_names.TRACE}").write_bytes(b"")
    notes, problems = doctor_run.devices(runs.read(run.rundir.path))
    assert [note.partition(":")[0] for note in notes] == ["step 2, b"]
    assert problems == ["step 2, c: the trace has no GPU activity: why"]


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"NVTX_INJECTION64_PATH": "/usr/lib/libcupti.so.12"}, "NVTX_INJECTION64_PATH names libcupti"),
        ({"CUDA_INJECTION64_PATH": "/x/libmine.so"}, "CUDA_INJECTION64_PATH loads libmine.so"),
        ({"KINETO_USE_DAEMON": "0"}, "dynolog"),
        ({"NVTX_INJECTION64_PATH": foreign.NOTHING}, "the GPU had nothing to do"),
        ({}, "the GPU had nothing to do"),
    ],
)
def test_reasons(environ: dict[str, str], said: str) -> None:
    assert said in foreign.cupti_suspicion(environ)


@pytest.mark.parametrize("tool", [(), ("torch",), ("torch", "memory"), ("npu", "torch")])
def test_nvtx_is_kept_from_loading_libcupti(tool: tuple[str, ...]) -> None:
    environ = {"NVTX_INJECTION64_PATH": "/usr/local/cuda/lib64/libcupti.so"}
    assert foreign.free_cupti(tool, environ)
    assert environ == {"NVTX_INJECTION64_PATH": foreign.NOTHING}
    assert not foreign.free_cupti(tool, environ)


@pytest.mark.parametrize(
    ("tool", "environ"),
    [
        (("nsys",), {"NVTX_INJECTION64_PATH": "/usr/lib/libcupti.so"}),
        (("torch",), {"NVTX_INJECTION64_PATH": "/nsys/libToolsInjection64.so"}),
        (("torch",), {"NVTX_INJECTION64_PATH": "/opt/cupti-tools/libmine.so"}),
        (("torch",), {"NVTX_INJECTION64_PATH": "/usr/lib/libcupti.so", "AUTOPROF_KEEP_NVTX_INJECTION": "1"}),
        (("torch",), {"NVTX_INJECTION64_PATH": "/usr/lib/libcupti.so", "VERL_KEEP_NVTX_INJECTION": "1"}),
        (("torch",), {}),
    ],
)
def test_what_else_it_loads_stays(tool: tuple[str, ...], environ: dict[str, str]) -> None:
    before = dict(environ)
    assert not foreign.free_cupti(tool, environ)
    assert environ == before


def test_a_run_goes_without_it_and_says_so_once(python: Any) -> None:
    code = """
import os, subprocess, sys
from autoprof import agent
agent.join()
print(os.environ["NVTX_INJECTION64_PATH"])
if len(sys.argv) == 1:
    subprocess.run([sys.executable, "-c", sys.orig_argv[2], "child"], check=True)
"""
    result = python(code, AUTOPROF="1", AUTOPROF_RUN_ID="run", NVTX_INJECTION64_PATH="/cuda/libcupti.so")
    assert result.stdout.split() == [foreign.NOTHING] * 2
    assert result.stderr.count("NVTX_INJECTION64_PATH named libcupti") == 1
    code = "import os, autoprof; print(os.environ['NVTX_INJECTION64_PATH'])"
    assert python(code, NVTX_INJECTION64_PATH="/cuda/libcupti.so").stdout.strip() == "/cuda/libcupti.so"
