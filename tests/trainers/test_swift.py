"""ms-swift in real runs on the CPU: GRPO with vLLM in the trainer's process, GRPO without vLLM, and SFT."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.real.assets import tiny_model
from tests.support import trainer_runs
from tests.support.helpers import ROOT
from tests.support.trl_runs import Ran

REWARDS = trainer_runs.SCRIPTS / "swift" / "rewards.py"
# Patches of vLLM with which new weights can be loaded on a CPU.
CPU = ROOT / "examples" / "verl_cpu" / "cpu"
# A quiet machine with 2 cores needs half a minute.
TIMEOUT_S = 600
COMMON = (
    "--model_type qwen2 --template qwen2_5 --tuner_type full --torch_dtype float32 --use_cpu true --max_steps 3"
    " --per_device_train_batch_size 4 --logging_steps 1 --save_strategy no --eval_strategy no --report_to none"
)
GRPO = "--rlhf_type grpo --reward_funcs length --num_generations 4 --max_completion_length 8 --beta 0.1"
VLLM = (
    "--use_vllm true --vllm_mode colocate --vllm_gpu_memory_utilization 0.1 --vllm_enforce_eager true"
    " --vllm_max_model_len 128 --sleep_level 0"
)


def train(folder: Path, module: str, *words: str) -> Ran:
    """Train three steps in a folder with ms-swift's own command line; the second is captured."""
    packages = trainer_runs.packages_of("swift")
    turns = ("user", "What is one plus one?"), ("assistant", "Two.")
    row = {"messages": [{"role": role, "content": content} for role, content in turns]}
    (folder / "data.jsonl").write_text(24 * (json.dumps(row) + "\n"))
    places = ["--model", tiny_model(), "--dataset", str(folder / "data.jsonl"), "--output_dir", str(folder / "out")]
    command = [sys.executable, "-m", module, *places, *COMMON.split(), *words]
    env = trainer_runs.environment(
        CPU,
        packages,
        AUTOPROF="1",
        AUTOPROF_STEPS="2",
        USE_HF="1",
        MODELSCOPE_CACHE=str(folder / "cache"),
        TORCH_COMPILE_DISABLE="1",
        VLLM_PLUGINS="cpu_reload",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
    )
    return trainer_runs.run(command, folder, env, TIMEOUT_S)


@pytest.fixture(scope="module")
def grpo(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("swift_grpo")
    words = [*GRPO.split(), "--external_plugins", str(REWARDS), *VLLM.split()]
    return train(folder, "swift.cli.rlhf", *words)


@pytest.fixture(scope="module")
def without_vllm(thorough: None, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("swift_transformers")
    return train(folder, "swift.cli.rlhf", *GRPO.split(), "--external_plugins", str(REWARDS))


@pytest.fixture(scope="module")
def sft(thorough: None, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return train(tmp_path_factory.mktemp("swift_sft"), "swift.cli.sft", "--gradient_accumulation_steps", "1")


# The second compute_log_prob is the reference model's, which uses the same method.
GRPO_STAGES = {
    "actor.compute_log_prob",
    "actor.compute_log_prob.2",
    "actor.optimizer_step",
    "actor.update_actor",
    "reward.compute_reward",
    "trainer.compute_advantage",
}


def test_every_stage_of_the_chosen_step_is_captured(grpo: Ran) -> None:
    assert grpo.steps() == [2]
    assert grpo.names(2) == GRPO_STAGES | {"actor.update_weights", "rollout.replica0"}


def test_vllm_in_the_trainers_process_records_its_forward_passes(grpo: Ran) -> None:
    assert grpo.operators(2, "rollout.replica0")["aten::linear"] > 0


def test_the_trace_of_the_update_has_the_backward_pass(grpo: Ran) -> None:
    assert "MmBackward0" in grpo.operators(2, "actor.update_actor")


def test_all_steps_and_their_stages_are_on_the_timeline(grpo: Ran) -> None:
    assert [span["step"] for span in grpo.spans("step")] == [1, 2, 3]
    found = {span["name"] for span in grpo.spans() if span["step"] == 3}
    assert {"generate", "update_weights", "compute_reward", "compute_log_prob", "update_actor"} <= found


def test_without_vllm_generation_is_a_stage(without_vllm: Ran) -> None:
    assert without_vllm.names(2) == GRPO_STAGES | {"rollout.generate"}


def test_sft_is_captured_by_the_recipe_of_transformers(sft: Ran) -> None:
    assert sft.names(2) == {"trainer.optimizer_step", "trainer.training_step"}
