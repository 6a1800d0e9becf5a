"""torchtitan's Trainer with its debug model, on one rank."""

from __future__ import annotations

import sys

import pytest

from tests.support import trainer_runs
from tests.support.trainer_runs import SCRIPTS
from tests.support.trl_runs import Ran

SCRIPT = SCRIPTS / "torchtitan" / "train.py"
UPDATE = ["forward_backward", "forward_backward", "optimizer_step"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    packages = trainer_runs.packages_of("torchtitan")
    environment = trainer_runs.environment(packages, SCRIPTS, AUTOPROF="1", AUTOPROF_STEPS="2")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    return trainer_runs.run([*torchrun, str(SCRIPT)], tmp_path_factory.mktemp("torchtitan"), environment)


def test_micro_batches_checkpoint_and_validation_are_parts_of_their_step(trained: Ran) -> None:
    assert trained.said["global_step"] == 3
    assert [span["step"] for span in trained.spans("step")] == [1, 2, 3]
    stages = [[span["name"] for span in trained.spans() if span["step"] == number] for number in (1, 2, 3)]
    assert stages == [[*UPDATE, "validate"], [*UPDATE, "save_checkpoint"], [*UPDATE, "save_checkpoint", "validate"]]


def test_the_trace_of_each_stage_has_its_operators(trained: Ran) -> None:
    assert trained.steps() == [2]
    names = {"forward_backward", "forward_backward.2", "optimizer_step", "save_checkpoint"}
    assert trained.names(2) == {f"trainer.{name}" for name in names}
    for name in ("forward_backward", "forward_backward.2"):
        update = trained.operators(2, f"trainer.{name}")
        assert update["aten::embedding"] == 1
        assert any("Backward" in operator for operator in update)
    optimizer = trained.operators(2, "trainer.optimizer_step")
    assert any("adamw" in operator for operator in optimizer)
    assert not any("Backward" in operator for operator in optimizer)
