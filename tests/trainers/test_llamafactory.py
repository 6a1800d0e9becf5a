"""LLaMA-Factory's SFT and DPO in real runs on the CPU, captured by the recipes of transformers and TRL."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from autoprof import _boot
from tests.real.assets import tiny_model
from tests.support import trainer_runs
from tests.support.trl_runs import Ran

SCRIPTS = trainer_runs.SCRIPTS / "llamafactory"
# A quiet machine with 2 cores needs half a minute for both.
TIMEOUT_S = 600
COMMON = {
    "do_train": True,
    "finetuning_type": "full",
    "template": "qwen",
    "cutoff_len": 64,
    "per_device_train_batch_size": 2,
    "max_steps": 3,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "fp16": False,
}
ROWS = {
    "answers": {"instruction": "What is one plus one?", "input": "", "output": "Two."},
    "preferences": {"instruction": "What is one plus one?", "input": "", "chosen": "Two.", "rejected": "Three."},
}
FORMATS = {
    "answers": {"file_name": "answers.json"},
    "preferences": {
        "file_name": "preferences.json",
        "ranking": True,
        "columns": {"prompt": "instruction", "chosen": "chosen", "rejected": "rejected"},
    },
}


def train(folder: Path, stage: str, dataset: str) -> Ran:
    """Train three steps in a folder with LLaMA-Factory's own command line; the second is captured."""
    packages = trainer_runs.packages_of("llamafactory")
    for name, row in ROWS.items():
        (folder / f"{name}.json").write_text(json.dumps([row] * 24))
    (folder / "dataset_info.json").write_text(json.dumps(FORMATS))
    data = {"dataset": dataset, "dataset_dir": str(folder), "output_dir": str(folder / "out")}
    asked = {"stage": stage, "model_name_or_path": tiny_model()} | data | COMMON
    (folder / "train.yaml").write_text(json.dumps(asked))
    env = trainer_runs.environment(
        SCRIPTS, packages, AUTOPROF="1", AUTOPROF_STEPS="2", DISABLE_VERSION_CHECK="1", USE_V1="0"
    )
    return trainer_runs.run([sys.executable, "-m", "llamafactory.cli", "train", "train.yaml"], folder, env, TIMEOUT_S)


@pytest.fixture(scope="module", params=[("sft", "answers"), ("dpo", "preferences")], ids=["sft", "dpo"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    stage, dataset = request.param
    return train(tmp_path_factory.mktemp(f"llamafactory_{stage}"), stage, dataset)


def test_llamafactory_has_no_recipe() -> None:
    assert "llamafactory" not in _boot.recipe_files()


def test_the_chosen_step_is_captured(trained: Ran) -> None:
    assert trained.steps() == [2]
    assert trained.names(2) == {"trainer.optimizer_step", "trainer.training_step"}


def test_the_trace_of_the_training_step_has_the_backward_pass(trained: Ran) -> None:
    assert "MmBackward0" in trained.operators(2, "trainer.training_step")


def test_all_steps_are_on_the_timeline(trained: Ran) -> None:
    assert [span["step"] for span in trained.spans("step")] == [1, 2, 3]
