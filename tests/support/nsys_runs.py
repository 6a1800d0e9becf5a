"""Processes that seem to run under Nsight Systems, on a machine without a GPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autoprof.capture import finisher
from autoprof.capture.artifacts import Subject
from autoprof.capture.profilers import nsys
from autoprof.config.settings import Settings
from autoprof.run import runtime
from tests.support import captures
from tests.support.captures import SUBJECT, begun

NSYS = Settings(tool=("nsys",))
VARIABLES = ("NSYS_PROFILING_SESSION_ID", "CUDA_INJECTION64_PATH", "LD_PRELOAD", nsys.REPORT)


@pytest.fixture(autouse=True)
def own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(finisher, "_UNCHANGED_S", 0.1)
    monkeypatch.setattr(finisher, "_REPORT_PAUSE_S", 0.01)


@pytest.fixture
def cuda(mocker: Any) -> list[str]:
    """Replace torch's CUDA functions, and return the list of calls to them, in order."""
    calls: list[str] = []
    mocker.patch("torch.cuda.is_initialized", return_value=True)
    mocker.patch("torch.cuda.synchronize", side_effect=lambda: calls.append("synchronize"))
    mocker.patch("torch.cuda.profiler.start", side_effect=lambda: calls.append("start"))
    mocker.patch("torch.cuda.profiler.stop", side_effect=lambda: calls.append("stop"))
    mocker.patch("torch.cuda.nvtx.mark", side_effect=lambda text: calls.append(f"mark {text}"))
    mocker.patch("torch.cuda.nvtx.range_start", side_effect=lambda text: calls.append(f"range {text}") or 7)
    mocker.patch("torch.cuda.nvtx.range_end", side_effect=lambda number: calls.append(f"end {number}"))
    return calls


@pytest.fixture
def under_nsys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process seem to run under an nsys that the user started."""
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "4711")


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Make this process seem an actor that Ray started under nsys; return the report's path without suffixes."""
    node = SimpleNamespace(get_logs_dir_path=lambda: str(tmp_path / "logs"))
    worker = SimpleNamespace(_global_node=node, global_worker=SimpleNamespace(mode=1), WORKER_MODE=1)
    monkeypatch.setitem(sys.modules, "ray._private.worker", worker)
    monkeypatch.setenv(nsys.REPORT, nsys.OUTPUT)
    folder = tmp_path / "logs" / "nsight"
    folder.mkdir(parents=True)
    return folder / f"autoprof_{os.getpid()}"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Set PATH to a folder that contains only an nsys."""
    path = tmp_path / "bin" / "nsys"
    path.parent.mkdir()
    version = "NVIDIA Nsight Systems version 2026.1.1-stand-in"
    path.write_text(f'#!/bin/sh\n[ "$1" = profile ] && echo "repeat[:N][:mode]" || echo {version}\n')
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(path.parent))
    return path


def finished(run: runtime.Runtime) -> dict[str, dict[str, Any]]:
    """Wait until all files are complete, and return the meta file of each capture by role and stage."""
    return {name.split(".rank")[0]: meta for name, (meta, _) in captures.finished(run).items()}


def record(run: runtime.Runtime, subject: Subject = SUBJECT) -> None:
    begun(run, subject).stop()
