"""Loops without a trainer class (DeepSpeed's engine with ZeRO-2, accelerate, both), and a trainer that uses both."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support import trainer_runs
from tests.support.trainer_runs import SCRIPTS
from tests.support.trl_runs import Ran

SCRIPT = SCRIPTS / "deepspeed" / "loops.py"
STAGES = ["forward", "backward", "forward", "backward", "optimizer_step"]
# Captures of the step with a checkpoint.
CAPTURED = {f"trainer.{stage}{number}" for stage in ("forward", "backward") for number in ("", ".2")}
CAPTURED |= {"trainer.optimizer_step", "trainer.save_checkpoint"}


def start(folder: Path, launcher: list[str], *kinds: str) -> Ran:
    environment = trainer_runs.environment(
        trainer_runs.packages_of("deepspeed"),
        DS_ACCELERATOR="cpu",
        AUTOPROF="1",
        AUTOPROF_STEPS="2",
        AUTOPROF_RANKS="all",
    )
    return trainer_runs.run([sys.executable, *launcher, str(SCRIPT), *kinds], folder, environment)


def loops(folder: Path, ranks: int, *kinds: str) -> Ran:
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    return start(folder, torchrun if ranks else [], *kinds)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return loops(tmp_path_factory.mktemp("engine"), 2, "engine")


@pytest.fixture(scope="module")
def accelerated(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return loops(tmp_path_factory.mktemp("accelerated"), 0, "accelerated", "plain")


@pytest.fixture(scope="module")
def above(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return loops(tmp_path_factory.mktemp("above"), 1, "both", "trainer")


@pytest.fixture(scope="module")
def launched(thorough: None, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Run the loop with both; the launcher has the whole configuration of DeepSpeed."""
    ours = ["--use_deepspeed", "--zero_stage", "2", "--gradient_accumulation_steps", "2"]
    common = ["--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    launcher = ["-m", "accelerate.commands.launch", *ours, *common]
    return start(tmp_path_factory.mktemp("launched"), launcher, "launched")


def stages(ran: Ran, rank: int = 0) -> list[list[str]]:
    """Return the stages of each step of a rank, in order."""
    steps = [span for span in ran.spans("step") if span["rank"] == rank]
    spans = [span for span in ran.spans() if span["rank"] == rank]
    return [
        [span["name"] for span in spans if step["start_ns"] <= span["start_ns"] <= step["end_ns"]] for step in steps
    ]


def test_the_micro_batches_of_an_engine_are_one_step_on_each_rank(engine: Ran) -> None:
    assert engine.said["losses"]["engine"][-1] == 3  # `global_steps`
    for rank in (0, 1):
        steps = [span["step"] for span in engine.spans("step") if span["rank"] == rank]
        assert steps == [1, 2, 3], f"rank {rank}"
        assert stages(engine, rank) == [STAGES, [*STAGES, "save_checkpoint"], STAGES]


def test_forward_backward_and_step_of_an_engine_are_captured(engine: Ran) -> None:
    assert engine.steps() == [2]
    assert engine.captures(2) == {f"{name}@{rank}": "complete" for name in CAPTURED for rank in (0, 1)}
    assert engine.operators(2, "trainer.forward")["aten::mse_loss"] == 1
    assert any("Backward" in name for name in engine.operators(2, "trainer.backward"))
    assert engine.operators(2, "trainer.optimizer_step")["aten::addcdiv_"] > 0


def test_a_loop_with_accumulate_has_one_step_per_optimizer_step(accelerated: Ran) -> None:
    updates = ["backward", "backward", "optimizer_step"]
    steps = stages(accelerated)
    assert [span["step"] for span in accelerated.spans("step")] == [1, 2, 3, 4, 5, 6]
    assert steps[:3] == [updates, [*updates, "save_checkpoint"], updates]
    assert accelerated.names(2) == {f"trainer.{name}" for name in [*steps[1], "backward.2"]}


def test_a_loop_without_accumulate_has_a_step_for_each_batch(accelerated: Ran) -> None:
    assert stages(accelerated)[3:] == [["backward", "optimizer_step"]] * 3


def test_the_last_step_ends_with_its_update(accelerated: Ran) -> None:
    last = accelerated.spans("step")[-1]
    update = [span for span in accelerated.spans() if span["name"] == "optimizer_step"][-1]
    assert last["start_ns"] <= update["start_ns"] <= update["end_ns"] <= last["end_ns"]


def test_the_stages_of_accelerate_with_deepspeed_come_from_deepspeed(above: Ran) -> None:
    assert stages(above)[:3] == [STAGES, [*STAGES, "save_checkpoint"], STAGES]


def test_accelerate_launch_has_one_run_whose_ranks_share_its_steps(launched: Ran) -> None:
    for rank in (0, 1):
        assert [span["step"] for span in launched.spans("step") if span["rank"] == rank] == [1, 2, 3]
        assert stages(launched, rank) == [STAGES, [*STAGES, "save_checkpoint"], STAGES]
    assert launched.steps() == [2]
    assert launched.captures(2) == {f"{name}@{rank}": "complete" for name in CAPTURED for rank in (0, 1)}
    assert any("Backward" in name for name in launched.operators(2, "trainer.backward"))


def test_the_steps_and_stages_come_from_a_trainer_above_the_engine(above: Ran) -> None:
    assert [span["step"] for span in above.spans("step")] == [1, 2, 3, 1, 2, 3]
    assert stages(above)[3:] == [["training_step", "training_step", "optimizer_step"]] * 3
    update = above.operators(2, "trainer.training_step.2", loop=2)
    # The training step contains the engine's forward, and with the last micro batch its optimizer step.
    assert update["aten::mse_loss"] == 1
    assert update["aten::addcdiv_"] > 0
