"""Captures in processes that have not imported torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.helpers import TORCH, spans

PROGRAM = """
import sys, threading
import autoprof

def step(number, inside=lambda: None):
    with autoprof.step(number), autoprof.stage("generate", role="rollout"):
        inside()
"""


@pytest.fixture
def captured(python: Any, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Runs a program with each step captured; returns the meta files in the order of the steps."""

    def run(code: str, **variables: str) -> list[dict[str, Any]]:
        on = {"AUTOPROF": "1", "AUTOPROF_STEPS": "::1", "AUTOPROF_RUN_ID": "made", "AUTOPROF_MIN_FREE_MB": "1"}
        result = python(PROGRAM + code, **on | variables)
        assert [line for line in result.stderr.splitlines() if not line.startswith("USDT")] == []
        paths = sorted((tmp_path / "autoprof_runs" / "made").glob("global_step_*/*.meta.json"))
        return [json.loads(path.read_text()) for path in paths]

    return run


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"AUTOPROF_MODE": "continuous"},
        {"AUTOPROF_TOOL": "npu,memory", "AUTOPROF_CONTENTS": "stack"},
        {"AUTOPROF_TOOL": "nsys", "NSYS_PROFILING_SESSION_ID": "1"},
    ],
)
def test_torch_is_not_imported(captured: Any, tmp_path: Path, autoprof: Any, variables: dict[str, str]) -> None:
    code = """
step(1)
step(2)
assert "torch" not in sys.modules
"""
    metas = captured(code, **variables)
    assert [(meta["step"], meta["tool"], meta["state"], meta["reason"], meta["bytes"]) for meta in metas] == [
        (step, "none", "complete", "no torch in this process", 0) for step in (1, 2)
    ]
    assert all(meta["clock"]["stop"]["unix_ns"] >= meta["clock"]["start"]["unix_ns"] > 0 for meta in metas)
    run = tmp_path / "autoprof_runs" / "made"
    assert [path.suffix for path in run.glob("global_step_*/*")] == [".json"] * 2
    assert [span["step"] for span in spans(run) if span["name"] == "generate"] == [1, 2]
    assert not [span for span in spans(run) if span["kind"] == "profiling"]
    doctor = autoprof("doctor", "made").stdout
    assert "captures: 2, 0 B; 2 without a trace, no torch in this process" in doctor
    assert "problems found" not in doctor.replace("no problems found", "")
    assert "complete, no torch in this process" in autoprof("ls", "made").stdout
    assert "0 traces" in autoprof("merge", "made", "--step", "1").stdout
    assert autoprof("report", "made", "--step", "1").returncode == 0


def test_a_capture_records_once_torch_is_imported(captured: Any) -> None:
    code = f"""
def first():
    {TORCH}
step(1, first)
def second():
    import torch
    torch.ones(2) + 1
step(2, second)
"""
    first, second = captured(code)
    reason = "the process had not imported torch when this capture began"
    assert (first["tool"], first["state"], first["reason"]) == ("none", "complete", reason)
    assert (second["tool"], second["state"], second["bytes"] > 0) == ("torch", "complete", True)


ENDS_ELSEWHERE = """
stage = autoprof.stage("generate", role="rollout")
with autoprof.step(1):
    stage.__enter__()
    thread = threading.Thread(target=stage.__exit__, args=(None, None, None))
    thread.start()
    thread.join()
"""
RAISES = """
try:
    step(1, lambda: {}["a"])
except KeyError:
    pass
"""


@pytest.mark.parametrize("code", [ENDS_ELSEWHERE, RAISES], ids=["it ends in another thread", "it raises"])
def test_a_stage_is_complete_as_nothing_is_lost(captured: Any, code: str) -> None:
    (meta,) = captured(code)
    assert (meta["state"], meta["reason"]) == ("complete", "no torch in this process")
