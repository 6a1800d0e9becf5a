"""Command line of verl for a tiny GRPO run of any release; each release gets the overrides that it supports."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

# Overrides of examples/verl_cpu/run_grpo.sh, which gives the reasons, and their names in older releases.
# Overrides with ++ exist only in the class of the rollout's configuration.
OVERRIDES = """
algorithm.adv_estimator=grpo
actor_rollout_ref.actor.use_kl_loss=True
data.train_files={assets}/data/train.parquet
data.val_files={assets}/data/test.parquet
data.train_batch_size=4
data.max_prompt_length=64
data.max_response_length=8
data.return_raw_chat=True
data.seed=1
data.shuffle=False
data.dataloader_num_workers=0
actor_rollout_ref.model.path={assets}/data/model
actor_rollout_ref.model.use_remove_padding=False
actor_rollout_ref.model.enable_gradient_checkpointing=False
actor_rollout_ref.actor.strategy=fsdp2
actor_rollout_ref.actor.ppo_mini_batch_size=4
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4
actor_rollout_ref.actor.optim.lr=1e-3
actor_rollout_ref.actor.use_torch_compile=False
actor_rollout_ref.actor.fsdp_config.use_torch_compile=False
actor_rollout_ref.ref.strategy=fsdp2
actor_rollout_ref.ref.use_torch_compile=False
actor_rollout_ref.ref.fsdp_config.use_torch_compile=False
actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4
actor_rollout_ref.rollout.name=vllm
actor_rollout_ref.rollout.mode=async
actor_rollout_ref.rollout.n=1
actor_rollout_ref.rollout.top_k=1
actor_rollout_ref.rollout.dtype=float32
actor_rollout_ref.rollout.logprobs_mode=raw_logprobs
actor_rollout_ref.rollout.tensor_model_parallel_size=1
actor_rollout_ref.rollout.enforce_eager=True
actor_rollout_ref.rollout.max_model_len=128
actor_rollout_ref.rollout.max_num_seqs=1
actor_rollout_ref.rollout.max_num_batched_tokens=512
actor_rollout_ref.rollout.enable_prefix_caching=False
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4
++actor_rollout_ref.rollout.enable_sleep_mode=False
actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=16
actor_rollout_ref.rollout.update_weights_bucket_megabytes=16
actor_rollout_ref.rollout.agent.num_workers=1
critic.enable=False
transfer_queue.backend.SimpleStorage.num_data_storage_units=1
trainer.device=cuda
trainer.nnodes=1
trainer.n_gpus_per_node=1
trainer.total_epochs=1
trainer.total_training_steps=3
trainer.val_before_train=False
trainer.test_freq=-1
trainer.save_freq=-1
trainer.resume_mode=disable
trainer.logger=[console]
trainer.default_local_dir={assets}/checkpoints
ray_init.num_cpus=16
ray_kwargs.ray_init.num_cpus=16
"""

# Overrides of releases in which reward functions have their own section. These releases send new weights to the
# engine's own processes.
FROM_0_7_1 = """
actor_rollout_ref.rollout.free_cache_engine=False
reward.num_workers=1
reward.custom_reward_function.path={examples}/reward.py
"""

# Overrides of earlier releases, which pass on weights when they wake up the engine.
UP_TO_0_7_0 = """
actor_rollout_ref.rollout.free_cache_engine=True
reward_model.num_workers=1
custom_reward_function.path={examples}/reward.py
"""

# Keys that releases read, although their configurations lack them.
ADDED = """
actor_rollout_ref.model.override_config.attn_implementation=sdpa
actor_rollout_ref.actor.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap=[Qwen2DecoderLayer]
actor_rollout_ref.ref.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap=[Qwen2DecoderLayer]
actor_rollout_ref.rollout.engine_kwargs.vllm.enable_sleep_mode=False
actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes=33554432
ray_kwargs.ray_init.address=local
ray_kwargs.ray_init.num_gpus=1
ray_kwargs.ray_init.include_dashboard=False
ray_kwargs.ray_init.object_store_memory=300000000
hydra.run.dir={assets}/hydra
"""


def overrides(package: Path, **places: Path) -> list[str]:
    """Return the overrides for the release whose package `verl` is in the folder `package`."""
    generated = package / "verl" / "trainer" / "config" / "_generated_ppo_trainer.yaml"
    known = yaml.safe_load(generated.read_text())
    classes = package / "verl" / "workers" / "config" / "rollout.py"
    fields = re.findall(r"^    (\w+):", classes.read_text(), re.MULTILINE) if classes.exists() else []
    offered = OVERRIDES + (FROM_0_7_1 if "reward" in known else UP_TO_0_7_0)
    lines = [line for line in offered.split() if _has(known, fields, line.partition("=")[0].split("."))]
    added = [line if line.startswith("hydra") else f"++{line}" for line in ADDED.split()]
    return [line.format(**places) for line in lines + added]


def _has(known: Any, fields: list[str], path: list[str]) -> bool:
    if path[0].startswith("++"):
        return path[-1] in fields
    for name in path:
        if not isinstance(known, dict) or name not in known:
            return False
        known = known[name]
    return True


if __name__ == "__main__":
    import sys

    print("\n".join(overrides(Path(sys.argv[1]), assets=Path(sys.argv[2]), examples=Path(sys.argv[3]))))
