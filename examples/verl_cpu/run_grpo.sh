#!/usr/bin/env bash
# Train a toy model with verl's GRPO on a CPU-only machine.
#
#   run_grpo.sh [hydra overrides...]
#
# Overrides on the command line come last and win: `trainer.use_v1=False` selects verl's legacy trainer.
# For keys that are set here, use `a.b=1` or `++a.b=1`, not `+a.b=1`.
#
#   PYTHON=...        the interpreter (default: .venv/bin/python of this checkout)
#   ASSETS=...        model, data, checkpoints and hydra's files (default: .assets in this folder)
#   DETERMINISTIC=1   make two runs report the same metrics, except times and memory
#   TRAINER=...       the trainer: main_ppo (default: V1, synchronous), colocate_async, separate_async,
#                     one_step_off, fully_async
#
# The run keeps the caller's working directory and environment. README.md explains the workarounds.
set -euo pipefail

here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
python=${PYTHON:-$here/../../.venv/bin/python}
assets=${ASSETS:-$here/.assets}
[[ $assets == /* ]] || assets=$PWD/$assets

AUTOPROF=0 "$python" "$here/make_assets.py" "$assets"

# --- environment -------------------------------------------------------------------------------
# The workarounds in cpu/: verl's platform plugin, vLLM's plugin and the metadata that declares it.
export PYTHONPATH=$here/cpu${PYTHONPATH:+:$PYTHONPATH}
export VERL_PLATFORM=cpu VERL_USE_EXTERNAL_MODULES=verl_cpu_platform
# A critic needs one more workaround. It is imported only then, because the import takes time in every process.
[[ " $* " == *" algorithm.adv_estimator=gae "* ]] && VERL_USE_EXTERNAL_MODULES+=,verl_cpu_critic
# verl registers its FSDP engine for cuda and npu only; the engine itself runs on any device.
export VERL_ENGINE_DEVICE=cuda
# Many processes share few cores: use one thread each, and do not pin vLLM's worker to a core.
export OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind
# vLLM compiles one helper with the C++ compiler even in eager mode. That takes too long for a few calls.
export TORCH_COMPILE_DISABLE=1
# No downloads, no usage reports, and no token in the home directory.
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 RAY_USAGE_STATS_ENABLED=0 RAY_AUTH_MODE=disabled
# Complete output: every line of every process, and hydra's full stack traces.
export RAY_DEDUP_LOGS=0 HYDRA_FULL_ERROR=1

overrides=(
  # --- algorithm: GRPO with a KL term, so that verl computes reference log probs ---
  algorithm.adv_estimator=grpo
  actor_rollout_ref.actor.use_kl_loss=True

  # --- data: 4 prompts a step, in a fixed order, loaded by the trainer process itself ---
  "data.train_files='$assets/data/train.parquet'"
  "data.val_files='$assets/data/test.parquet'"
  data.train_batch_size=4
  data.max_prompt_length=64
  data.max_response_length=32
  data.seed=1
  data.dataloader_num_workers=0

  # --- model: plain attention; flash-attn and its unpadded layout need a GPU ---
  "actor_rollout_ref.model.path='$assets/data/model'"
  actor_rollout_ref.model.use_remove_padding=False
  actor_rollout_ref.model.enable_gradient_checkpointing=False
  ++actor_rollout_ref.model.override_config.attn_implementation=sdpa

  # --- actor and reference: FSDP2 on one process, one update of one batch per step ---
  actor_rollout_ref.actor.strategy=fsdp2
  actor_rollout_ref.actor.ppo_mini_batch_size=4
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4
  actor_rollout_ref.actor.optim.lr=1e-3
  actor_rollout_ref.actor.use_torch_compile=False
  actor_rollout_ref.actor.fsdp_config.use_torch_compile=False
  actor_rollout_ref.ref.fsdp_config.use_torch_compile=False
  actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4

  # --- critic: off with GRPO; ready for `algorithm.adv_estimator=gae` ---
  "critic.model.path='$assets/data/model'"
  critic.model.use_remove_padding=False
  critic.model.enable_gradient_checkpointing=False
  ++critic.model.override_config.attn_implementation=sdpa
  critic.strategy=fsdp2
  critic.fsdp.use_torch_compile=False
  critic.ppo_micro_batch_size_per_gpu=4
  critic.optim.lr=1e-3

  # --- rollout: vLLM, 2 answers per prompt, everything small, eager, never put to sleep ---
  actor_rollout_ref.rollout.name=vllm
  actor_rollout_ref.rollout.n=2
  actor_rollout_ref.rollout.tensor_model_parallel_size=1
  actor_rollout_ref.rollout.enforce_eager=True
  actor_rollout_ref.rollout.max_model_len=128
  actor_rollout_ref.rollout.max_num_seqs=16
  actor_rollout_ref.rollout.max_num_batched_tokens=512
  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4
  # The CPU backend can neither free nor restore its memory.
  actor_rollout_ref.rollout.free_cache_engine=False
  ++actor_rollout_ref.rollout.enable_sleep_mode=False
  # 32 MiB of KV cache instead of a share of the machine's memory.
  ++actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes=33554432
  # The shared-memory buffer that carries new weights; the model has 0.25 MB.
  actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=16

  # --- processes: one of each kind, because their start takes most of the time ---
  actor_rollout_ref.rollout.agent.num_workers=1
  reward.num_workers=1
  transfer_queue.backend.SimpleStorage.num_data_storage_units=1
  "reward.custom_reward_function.path='$here/reward.py'"

  # --- V1's buffer of finished answers: polls faster than the built-in one, and keeps the data's order ---
  trainer.v1.sampler.custom_sampler.path=pkg://ordered_replay_buffer
  trainer.v1.sampler.custom_sampler.name=OrderedReplayBuffer

  # --- trainer: 4 steps, console only, no validation and no checkpoints by default ---
  trainer.device=cpu
  trainer.nnodes=1
  trainer.n_gpus_per_node=1
  trainer.total_epochs=1
  trainer.total_training_steps=4
  trainer.val_before_train=False
  trainer.test_freq=-1
  trainer.save_freq=-1
  trainer.resume_mode=disable
  trainer.logger=[console]
  trainer.project_name=verl_cpu
  trainer.experiment_name=grpo
  "trainer.default_local_dir='$assets/checkpoints'"
  "hydra.run.dir='$assets/hydra'"

  # --- ray: a separate cluster with nominal resources, no dashboard ---
  ++ray_kwargs.ray_init.address=local
  ray_kwargs.ray_init.num_cpus=16
  ++ray_kwargs.ray_init.num_gpus=1
  ++ray_kwargs.ray_init.include_dashboard=False
  ++ray_kwargs.ray_init.object_store_memory=300000000
)

# --- trainers whose engines have separate devices: a second nominal GPU, and weights over a socket ---
separate=(
  ++ray_kwargs.ray_init.num_gpus=2
  ray_kwargs.ray_init.num_cpus=48
  actor_rollout_ref.rollout.checkpoint_engine.backend=socket
  actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=verl_cpu_weights
)
small=(
  actor_rollout_ref.actor.ppo_mini_batch_size=2
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2
  actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=2
  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2
)
module=verl.trainer.main_ppo
case ${TRAINER:-main_ppo} in
  main_ppo) ;;
  colocate_async) overrides+=(trainer.v1.trainer_mode=colocate_async) ;;
  separate_async)
    # Two updates between two transfers of weights. The trainer's own device also has an engine: without it
    # (hybrid_engine=False), verl 0.9.1 raises when it logs that it has none.
    overrides+=(
      "${separate[@]}"
      trainer.v1.trainer_mode=separate_async
      trainer.v1.separate_async.parameter_sync_step=2
      "${small[@]}"
      actor_rollout_ref.rollout.nnodes=1
      actor_rollout_ref.rollout.n_gpus_per_node=1
    )
    ;;
  one_step_off)
    module=verl.experimental.one_step_off_policy.main_ppo
    overrides+=(
      "${separate[@]}"
      # verl's own search path is relative to a checkout.
      'hydra.searchpath=[pkg://verl.trainer.config]'
      actor_rollout_ref.hybrid_engine=False
      rollout.nnodes=1
      rollout.n_gpus_per_node=1
    )
    ;;
  fully_async)
    # Two updates of two prompts each between two transfers of weights: 4 versions from 16 prompts.
    module=verl.experimental.fully_async_policy.fully_async_main
    overrides+=(
      "${separate[@]}"
      data.train_batch_size=0
      data.gen_batch_size=1
      "${small[@]}"
      actor_rollout_ref.hybrid_engine=False
      rollout.nnodes=1
      rollout.n_gpus_per_node=1
      rollout.total_rollout_steps=16
      async_training.trigger_parameter_sync_step=2
    )
    ;;
  *)
    echo "TRAINER=$TRAINER is not a trainer; use main_ppo, colocate_async, separate_async, one_step_off or fully_async" >&2
    exit 2
    ;;
esac

if [[ ${DETERMINISTIC:-0} == 1 ]]; then
  overrides+=(
    # Always the likeliest token. Not temperature=0: verl divides the logits by it.
    actor_rollout_ref.rollout.top_k=1
    # Full precision, because in bfloat16 two tokens are often equally likely.
    actor_rollout_ref.rollout.dtype=float32
    # Log probs of the model itself; after top_k they would all be 0.
    actor_rollout_ref.rollout.logprobs_mode=raw_logprobs
    # One sequence at a time, computed from scratch: rounding depends on the other sequences in a batch.
    actor_rollout_ref.rollout.max_num_seqs=1
    actor_rollout_ref.rollout.enable_prefix_caching=False
    # Equal answers to a prompt would have no advantage; a single one has its reward.
    actor_rollout_ref.rollout.n=1
  )
fi

exec "$python" -m "$module" "${overrides[@]}" "$@"
