"""Trainer of transformers with methods replaced by Unsloth's own code for GPUs."""

from __future__ import annotations

import sys

import pytest

from tests.support import trainer_runs
from tests.support.trainer_runs import SCRIPTS
from tests.support.trl_runs import Ran


@pytest.fixture(scope="module")
def replaced(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    packages = trainer_runs.packages_of("unsloth")
    command = [sys.executable, str(SCRIPTS / "unsloth" / "replaced.py"), str(packages)]
    environment = trainer_runs.environment(AUTOPROF="1", AUTOPROF_STEPS="2")
    return trainer_runs.run(command, tmp_path_factory.mktemp("unsloth"), environment)


def test_unsloths_methods_are_installed(replaced: Ran) -> None:
    assert replaced.said["replaced"] == {
        "training_step": "_unsloth_training_step",
        "compute_loss": "_unsloth_pre_compute_loss",
        "_inner_training_loop": "_fast_inner_training_loop",
    }


def test_steps_and_stages_equal_those_of_the_trainer(replaced: Ran) -> None:
    assert [span["step"] for span in replaced.spans("step")] == [1, 2, 3]
    assert [span["name"] for span in replaced.spans()] == ["training_step", "training_step", "optimizer_step"] * 3


def test_updates_end_with_the_replaced_method(replaced: Ran) -> None:
    assert replaced.names(2) == {"trainer.training_step", "trainer.training_step.2", "trainer.optimizer_step"}
    for name in ("trainer.training_step", "trainer.training_step.2"):
        operators = replaced.operators(2, name)
        assert operators["aten::mse_loss"] == 1
        assert not any("addcdiv" in operator or "lerp" in operator for operator in operators)
