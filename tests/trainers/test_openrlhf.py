"""OpenRLHF in real runs on the CPU: Ray, DeepSpeed, and the vLLM engines inside of its `RolloutRayActor`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.real.assets import tiny_model
from tests.support import trainer_runs
from tests.support.helpers import ROOT
from tests.support.trl_runs import Ran

SCRIPTS = trainer_runs.SCRIPTS / "openrlhf"
# Keeps the layers of vLLM such that new weights can be loaded.
CPU = ROOT / "examples" / "verl_cpu" / "cpu"
# A quiet machine with 2 cores needs a minute and a half.
TIMEOUT_S = 900
# Two engines, an actor and a reference model.
GPUS = 4
ARGUMENTS = {
    "actor.num_gpus_per_node": "1",
    "actor.num_nodes": "1",
    "ref.num_gpus_per_node": "1",
    "ref.num_nodes": "1",
    "reward.remote_url": str(SCRIPTS / "reward.py"),
    "data.input_key": "question",
    "data.label_key": "answer",
    "data.apply_chat_template": None,
    "data.max_len": "64",
    "data.max_samples": "8",
    "rollout.batch_size": "4",
    "rollout.n_samples_per_prompt": "2",
    "rollout.micro_batch_size": "4",
    "rollout.max_new_tokens": "8",
    "train.batch_size": "8",
    "train.micro_batch_size": "4",
    "vllm.num_engines": "2",
    "vllm.tensor_parallel_size": "1",
    "vllm.sync_backend": "gloo",
    "vllm.enforce_eager": None,
    "vllm.gpu_memory_utilization": "0.1",
    "ds.zero_stage": "2",
    "ds.param_dtype": "bf16",
    "ds.attn_implementation": "eager",
    "algo.kl.init_coef": "0.01",
    "algo.advantage.estimator": "group_norm",
    "eval.steps": "-1",
    "ckpt.save_steps": "-1",
}


def train(folder: Path, *, gpus: int = GPUS, arguments: dict[str, str | None], **variables: str) -> Ran:
    """Train in a folder, by OpenRLHF's own command line."""
    packages = trainer_runs.packages_of("openrlhf")
    prompts = folder / "prompts.jsonl"
    prompts.write_text(
        "".join(json.dumps({"question": f"What is {n} plus 1?", "answer": n + 1}) + "\n" for n in range(24))
    )
    given = ARGUMENTS | {
        "actor.model_name_or_path": tiny_model(),
        "data.prompt_dataset": str(prompts),
        "ckpt.output_dir": str(folder / "model"),
        "ckpt.path": str(folder / "checkpoints"),
    }
    words = [
        word
        for name, value in (given | arguments).items()
        for word in ([f"--{name}"] if value is None else [f"--{name}", value])
    ]
    command = [sys.executable, str(SCRIPTS / "train.py"), str(gpus), *words]
    cpu = {
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "DS_ACCELERATOR": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    env = trainer_runs.environment(SCRIPTS, CPU, packages, AUTOPROF="1", **cpu, **variables)
    return trainer_runs.run(command, folder, env, TIMEOUT_S)


@pytest.fixture(scope="module")
def grpo(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Two steps of GRPO, the second captured."""
    return train(tmp_path_factory.mktemp("openrlhf_grpo"), arguments={}, AUTOPROF_STEPS="2")


def test_the_chosen_step_has_a_folder(grpo: Ran) -> None:
    assert grpo.steps() == [2]
