"""Megatron-LM's own loop, on one rank in fp32, and on two ranks as a pipeline in bf16."""

from __future__ import annotations

import sys

import pytest

from tests.support import trainer_runs
from tests.support.trainer_runs import SCRIPTS
from tests.support.trl_runs import Ran

SCRIPT = SCRIPTS / "megatron" / "pretrain.py"
ASIDE = {"megatron/save-checkpoint", "megatron/evaluate"}
UPDATE = ["forward_backward", "optimizer_step"]


def pretrain(tmp_path_factory: pytest.TempPathFactory, ranks: int, arguments: str) -> Ran:
    packages = trainer_runs.packages_of("megatron")
    variables = {"AUTOPROF": "1", "AUTOPROF_STEPS": "2", "AUTOPROF_RANKS": "all"}
    environment = trainer_runs.environment(packages, SCRIPTS, **variables)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    folder = tmp_path_factory.mktemp(f"ranks{ranks}")
    return trainer_runs.run([*torchrun, str(SCRIPT), *arguments.split()], folder, environment)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return pretrain(tmp_path_factory, 1, "--num-layers 1")


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Run two ranks with two interleaved pipeline stages each."""
    parallel = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
    return pretrain(tmp_path_factory, 2, f"--num-layers 4 --bf16 --eval-iters 0 {parallel}")


def stages(ran: Ran, rank: int = 0) -> list[list[str]]:
    """Return the stages of each step of a rank, in order."""
    spans = [span for span in ran.spans() if span["rank"] == rank]
    return [[span["name"] for span in spans if span["step"] == number] for number in (1, 2, 3)]


def test_iterations_are_steps_with_checkpoint_and_evaluation(alone: Ran) -> None:
    assert alone.said["global_step"] == 3
    assert [span["step"] for span in alone.spans("step")] == [1, 2, 3]
    assert stages(alone) == [UPDATE, [*UPDATE, "save_checkpoint"], [*UPDATE, "evaluate"]]
    kinds = {span["name"]: span["stage_kind"] for span in alone.spans()}
    assert kinds == {
        "forward_backward": "update_actor",
        "optimizer_step": "optimizer",
        "save_checkpoint": "checkpoint",
        "evaluate": "validate",
    }


def test_the_trace_of_each_stage_has_its_operators(alone: Ran) -> None:
    assert alone.names(2) == {"trainer.forward_backward", "trainer.optimizer_step", "trainer.save_checkpoint"}
    update, optimizer = (alone.operators(2, f"trainer.{name}") for name in UPDATE)
    assert update["aten::embedding"] == 4  # tokens and positions of both micro batches
    assert any("Backward" in name for name in update)
    assert optimizer["aten::addcdiv_"] + optimizer["aten::_foreach_addcdiv_"] > 0
    assert not any("Backward" in name for name in optimizer)


def test_stages_after_the_loop_belong_to_no_step(alone: Ran) -> None:
    assert [span["name"] for span in alone.spans() if span["step"] is None] == ["save_checkpoint", *["evaluate"] * 2]


def test_each_rank_of_a_pipeline_has_all_stages(pipeline: Ran) -> None:
    names = [*UPDATE, "save_checkpoint"]
    for rank in (0, 1):
        assert stages(pipeline, rank) == [UPDATE, names, UPDATE], f"rank {rank}"
    assert pipeline.captures(2) == {f"trainer.{name}@{rank}": "complete" for name in names for rank in (0, 1)}


def test_each_schedule_has_its_own_hook_and_the_optimizer_is_chained(alone: Ran, pipeline: Ran) -> None:
    for ran, schedule, ranks in ((alone, "forward-backward", 1), (pipeline, "forward-backward-interleaved", 2)):
        found = [process["hooks"] for process in ran.processes()]
        trained = [{name for name, hook in hooks.items() if hook["called"]} for hooks in found if hooks]
        expected = {f"megatron/{name}" for name in ("train", "step-begin", schedule, "optimizer-chained")}
        fired = [names for names in trained if "megatron/train" in names]
        assert len(fired) == ranks
        assert all(names - ASIDE == expected for names in fired)
