"""Engines and verl, if they are installed."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from bench.gpu.captures import spans
from bench.gpu.facts import Fact, row
from bench.gpu.rows.basics import counted, kernels, states
from bench.gpu.workbench import ROOT, Workbench

_EXAMPLE = ROOT / "examples" / "verl_cpu"


@row(120, modules=("vllm",), gpu=True)
def vllm(bench: Workbench) -> Iterator[Fact]:
    """vLLM's LLM: the second batch"""
    ran = bench.program("vllm_batches", steps="2")
    yield bench.fact("all tokens are generated", ran.said["tokens"] == 256, ran.said["tokens"])
    yield bench.fact("every capture is complete", set(states(ran)) == {"complete"}, counted(states(ran)))
    workers = [capture for capture in ran.captures("rollout") if capture.meta.get("part") != "frontend"]
    counts = [len(capture.trace.kernels) for capture in workers]
    yield bench.on_gpu("kernels are in the workers' traces", counts and all(counts), counts)


@row(150, modules=("sglang",), gpu=True)
def sglang(bench: Workbench) -> Iterator[Fact]:
    """SGLang's server: the second request"""
    ran = bench.program("sglang_batches", steps="2", environment={"SERVER_AUTOPROF": "1"})
    yield bench.fact("all tokens are generated", ran.said["tokens"] == 64, ran.said["tokens"])
    yield bench.fact("every capture is complete", set(states(ran)) == {"complete"}, counted(states(ran)))
    yield from kernels(bench, ran, "rollout")


@row(240, modules=("verl", "vllm", "ray"), gpu=True)
def verl(bench: Workbench) -> Iterator[Fact]:
    """verl's GRPO with vLLM on one GPU, four steps, the second captured"""
    folder = bench.folder("verl")
    shutil.copytree(_EXAMPLE, folder / "example", dirs_exist_ok=True)
    assets = folder / "assets"
    bench.run([sys.executable, str(folder / "example" / "make_assets.py"), str(assets)], label="assets", folder=folder)
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *verl_overrides(assets / "data", folder)]
    settings = {
        "AUTOPROF": "1",
        "AUTOPROF_STEPS": "2",
        "RAY_USAGE_STATS_ENABLED": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HYDRA_FULL_ERROR": "1",
    }
    ran = bench.run(command, label="verl", folder=folder, environment=settings)
    steps = [span["step"] for span in spans(ran.run)]
    yield bench.fact("the timeline has all four steps", steps == [1, 2, 3, 4], steps)
    roles = sorted({capture.stage.partition(".")[0] for capture in ran.captures()})
    yield bench.fact("actor, reference and rollout are captured", {"actor", "ref", "rollout"} <= set(roles), roles)
    yield from kernels(bench, ran, "actor.update_actor")


def verl_overrides(data: Path, folder: Path) -> list[str]:
    """Return the options of a small GRPO run on one GPU."""
    model, rollout = "actor_rollout_ref.model", "actor_rollout_ref.rollout"
    return [
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.actor.use_kl_loss=True",
        f"data.train_files='{data}/train.parquet'",
        f"data.val_files='{data}/test.parquet'",
        "data.train_batch_size=4",
        "data.max_prompt_length=64",
        "data.max_response_length=32",
        f"{model}.path='{data}/model'",
        f"{model}.use_remove_padding=False",
        f"++{model}.override_config.attn_implementation=sdpa",
        "actor_rollout_ref.actor.strategy=fsdp2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4",
        f"{rollout}.name=vllm",
        f"{rollout}.n=2",
        f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.enforce_eager=True",
        f"{rollout}.max_model_len=128",
        f"{rollout}.gpu_memory_utilization=0.3",
        f"{rollout}.log_prob_micro_batch_size_per_gpu=4",
        # In 0.9 it has moved.
        f"++custom_reward_function.path='{folder}/example/reward.py'",
        f"++reward.custom_reward_function.path='{folder}/example/reward.py'",
        "trainer.nnodes=1",
        "trainer.n_gpus_per_node=1",
        "trainer.total_epochs=1",
        "trainer.total_training_steps=4",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
        "trainer.logger=[console]",
        f"trainer.default_local_dir='{folder}/checkpoints'",
        f"hydra.run.dir='{folder}/hydra'",
    ]
