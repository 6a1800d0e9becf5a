"""TRL's GRPO with vLLM in the trainer's process: the trainer counts the steps, not vLLM's batches."""

from __future__ import annotations

import gzip
import json
import sys

import pytest

from tests.support import engines, processes
from tests.support.helpers import assert_no_failure, clean_environment
from tests.support.trl_runs import SCRIPT, Ran

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Train four steps, the second captured, with three passes of each rollout."""
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
    return Ran(folder, finished.output)


def test_vllm_records_into_the_trainers_step(run: Ran) -> None:
    assert run.steps() == [2]
    metas = [json.loads(path.read_text()) for path in run.run.glob("global_step_000002/*.meta.json")]
    assert {meta["state"] for meta in metas} == {"complete"}
    rollouts = [meta for meta in metas if meta["role"] == "rollout"]
    assert [(meta["replica"], meta["rank"], meta["part"]) for meta in rollouts] == [(0, 0, "rank0")]
    stages = {meta["stage"] for meta in metas if meta["role"] != "rollout"}
    assert stages == {"update_weights", "compute_log_prob", "compute_reward", "update_actor", "optimizer_step"}


def test_only_the_requested_passes_of_vllm_are_recorded(run: Ran) -> None:
    (trace,) = run.run.glob("global_step_000002/rollout.replica0.rank0.*.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert sum(str(event.get("name")).startswith("execute_") for event in events) == 3


def test_generation_batches_are_not_steps(run: Ran) -> None:
    assert [span["step"] for span in run.spans("step")] == [1, 2, 3, 4]
    generations = [span["step"] for span in run.spans() if span["name"] == "generate"]
    assert generations == [1, 2, 3, 4]
    assert [span["step"] for span in run.spans() if span["name"] == "evaluate"] == [None, 2, 4]


def test_autoprof_has_no_error(run: Ran) -> None:
    assert_no_failure(run.run)
