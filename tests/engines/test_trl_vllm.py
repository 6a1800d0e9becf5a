"""TRL's GRPO with vLLM in the trainer's process: the trainer counts the steps, not vLLM's batches."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import engines, helpers, processes
from tests.support.helpers import ROOT, clean_environment, processes_of

pytestmark = pytest.mark.real

SCRIPT = ROOT / "tests" / "engines" / "trl_scripts" / "trainers.py"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train four steps, the second captured, with three passes of each rollout; return the run directory."""
    folder = tmp_path_factory.mktemp("colocated")
    path = engines.one_package("trl-1.16.0", "trl", folder / "path")
    variables = {
        "PYTHONPATH": path,
        "AUTOPROF": "1",
        "AUTOPROF_ROLLOUT_ITERATIONS": "0:3",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    command = [sys.executable, str(SCRIPT), "colocated"]
    finished = processes.run(command, cwd=folder, env=clean_environment(**variables), timeout_s=300)
    assert finished.status == 0, finished.output[-8000:]
    (path,) = folder.glob("autoprof_runs/[0-9]*")
    return path


def spans(run: Path, kind: str) -> list[dict[str, Any]]:
    return [span for span in helpers.spans(run) if span["kind"] == kind]


def test_vllm_records_into_the_trainers_step(run: Path) -> None:
    assert [path.name for path in run.glob("global_step_*")] == ["global_step_000002"]
    metas = [json.loads(path.read_text()) for path in run.glob("global_step_000002/*.meta.json")]
    assert {meta["state"] for meta in metas} == {"complete"}
    rollouts = [meta for meta in metas if meta["role"] == "rollout"]
    assert [(meta["replica"], meta["rank"], meta["part"]) for meta in rollouts] == [(0, 0, "rank0")]
    stages = {meta["stage"] for meta in metas if meta["role"] != "rollout"}
    assert stages == {"update_weights", "compute_log_prob", "compute_reward", "update_actor", "optimizer_step"}


def test_only_the_requested_passes_of_vllm_are_recorded(run: Path) -> None:
    (trace,) = run.glob("global_step_000002/rollout.replica0.rank0.*.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert sum(str(event.get("name")).startswith("execute_") for event in events) == 3


def test_generation_batches_are_not_steps(run: Path) -> None:
    assert [span["step"] for span in spans(run, "step")] == [1, 2, 3, 4]
    generations = [span["step"] for span in spans(run, "stage") if span["name"] == "generate"]
    assert generations == [1, 2, 3, 4]
    assert [span["step"] for span in spans(run, "stage") if span["name"] == "evaluate"] == [None, 2, 4]


def test_autoprof_has_no_error(run: Path) -> None:
    for process in processes_of(run):
        assert process["errors"] == {}
        assert [key for key, hook in process["hooks"].items() if hook["state"] == "failed"] == []
