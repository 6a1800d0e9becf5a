"""Installation of the stand-in for torch_npu."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from autoprof.capture.profilers import foreign
from tests.contracts import stored

STAND_INS = Path(__file__).resolve().parent / "stand_ins"
RELEASES = stored.versions("torch_npu")


def install(monkeypatch: pytest.MonkeyPatch, release: str = RELEASES[-1]) -> Any:
    """Import the stand-in as `release` of torch_npu, with autoprof's hooks on it, and return the module."""
    monkeypatch.setenv("TORCH_NPU_STAND_IN", release)
    path = os.pathsep.join(filter(None, [str(STAND_INS), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.syspath_prepend(STAND_INS)
    remove()
    module = importlib.import_module("torch_npu")
    # wrapt does this only at a module's first import in a process.
    foreign.watch_npu(sys.modules["torch_npu.profiler.profiler"])
    return module


def remove() -> None:
    """Remove the stand-in from `sys.modules`."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch_npu"]:
        del sys.modules[name]
