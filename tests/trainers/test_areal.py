"""AReaL: asynchronous GRPO with a driver, a training worker, a generating worker, and vLLM's server."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.real.assets import tiny_model
from tests.support import trainer_runs
from tests.support.trainer_runs import SCRIPTS
from tests.support.trl_runs import Ran

HERE = SCRIPTS / "areal"


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Run three steps; the first two are captured."""
    folder = tmp_path_factory.mktemp("grpo")
    environment = trainer_runs.environment(
        HERE,
        trainer_runs.packages_of("areal"),
        AUTOPROF="1",
        AUTOPROF_STEPS="1,2",
        MODEL=tiny_model(),
        FOLDER=str(folder),
        # AReaL starts the server with `python3`.
        PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        TORCHDYNAMO_DISABLE="1",
        VLLM_CPU_KVCACHE_SPACE="1",
    )
    command = [sys.executable, str(HERE / "train.py"), "--config", str(HERE / "grpo.yaml")]
    return trainer_runs.run(command, folder, environment, timeout_s=1500)


def process_of(ran: Ran, part: str) -> dict[str, Any]:
    """Return the process whose command line contains this text."""
    (found,) = [each for each in ran.processes() if part in each["process"]]
    return found


def spans_of(ran: Ran, name: str, kind: str = "stage") -> list[dict[str, Any]]:
    return [span for span in ran.spans(kind) if span["name"] == name]


def test_the_driver_counts_all_steps(ran: Ran) -> None:
    # The server's batches are not steps.
    assert [(span["step"], span["role"]) for span in ran.spans("step")] == [(step, "trainer") for step in (1, 2, 3)]
    assert [span["step"] for span in spans_of(ran, "prepare_batch")] == [1, 2, 3]


def test_the_workers_stages_have_the_drivers_step_from_its_first_call_on(ran: Ran) -> None:
    for stage in ("compute_log_prob", "compute_advantages", "update_actor"):
        assert [span["step"] for span in spans_of(ran, stage)] == [1, 2, 3], stage
    synced = spans_of(ran, "update_weights")
    assert sorted((span["role"], span["step"]) for span in synced) == [
        *[("actor", step) for step in (1, 2, 3)],
        *[("trainer", step) for step in (1, 2, 3)],
    ]


def test_the_captured_steps_have_the_worker_and_the_server(ran: Ran) -> None:
    stages = {"compute_log_prob", "compute_advantages", "update_actor", "update_weights"}
    assert ran.steps() == [1, 2]
    for step in (1, 2):
        names = ran.names(step)
        assert {name for name in names if name.startswith("actor.")} == {f"actor.{stage}" for stage in stages}
        assert any(name.startswith("rollout.") for name in names)
    operators = {stage: ran.operators(1, f"actor.{stage}") for stage in stages}
    assert operators["compute_log_prob"]["aten::mm"]
    assert not any("Backward" in name for name in operators["compute_log_prob"])
    assert any("Backward" in name for name in operators["update_actor"])


def test_the_servers_windows_follow_the_trainers_steps(ran: Ran) -> None:
    windows = ran.spans("window")
    assert [window["step"] for window in windows] == [1, 2]
    taken = {span["step"]: span for span in spans_of(ran, "prepare_batch")}
    changed = {span["step"]: span for span in spans_of(ran, "update_weights") if span["role"] == "trainer"}
    for window in windows:
        # While the trainer works on a batch, the server generates the next one, until the weights are updated.
        assert window["start_ns"] < taken[window["step"]]["end_ns"]
        assert taken[window["step"]]["end_ns"] < window["end_ns"] < changed[window["step"]]["start_ns"]


def test_each_sample_has_the_version_of_its_weights(ran: Ran) -> None:
    samples = ran.spans("sample")
    # Three steps of two prompts with two answers each, and further answers that were begun in advance and cancelled.
    assert len([span for span in samples if span.get("error") is None]) >= 12
    assert len({span["ids"]["sample"] for span in samples}) == len(samples)
    for span in samples:
        # Step n begins with version n - 1 and ends with version n. After the last step there is no step.
        assert span["ids"]["version"] in ((3,) if span["step"] is None else (span["step"] - 1, span["step"]))
    assert 0 in {span["ids"]["version"] for span in samples}
    turns = ran.spans("turn")
    assert {turn["ids"]["sample"] for turn in turns} == {span["ids"]["sample"] for span in samples}
    for turn in turns:
        assert turn["ids"]["request"] == turn["ids"]["sample"]
        assert turn["counts"]["prompt_tokens"] > 0
        assert turn.get("error") is not None or 0 < turn["counts"]["response_tokens"] <= 12
    rewarded = {reward["ids"]["sample"] for reward in ran.spans("reward")}
    assert rewarded >= {span["ids"]["sample"] for span in samples if span.get("error") is None}


def test_all_processes_are_in_one_run_and_nothing_failed(ran: Ran) -> None:
    for part in ("train.py", "areal_vllm_server"):
        assert process_of(ran, part)["errors"] == {}
    # One worker each for training, generation and evaluation.
    workers = [each for each in ran.processes() if "areal.infra.rpc.rpc_server" in each["process"]]
    assert [each["errors"] for each in workers] == [{}, {}, {}]
    for each in [process_of(ran, "train.py"), *workers]:
        failed = {name: hook for name, hook in each["hooks"].items() if hook["state"] == "failed"}
        assert not failed
