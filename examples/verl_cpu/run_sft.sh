#!/usr/bin/env bash
# Train a toy model with verl's SFT trainer on a CPU-only machine.
#
#   run_sft.sh [hydra overrides...]
#
#   PYTHON=...        the interpreter (default: .venv/bin/python of this checkout)
#   ASSETS=...        model, data, checkpoints and hydra's files (default: .assets in this folder)
#   TRAINER=...       sft_trainer (default), under torchrun, or sft_trainer_ray, in a Ray worker
#   RANKS=...         number of processes that torchrun starts (default: 1)
#
# The run keeps the caller's working directory and environment. README.md explains the workarounds.
set -euo pipefail

here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
python=${PYTHON:-$here/../../.venv/bin/python}
assets=${ASSETS:-$here/.assets}
[[ $assets == /* ]] || assets=$PWD/$assets

AUTOPROF=0 "$python" "$here/make_assets.py" "$assets"

# The same workarounds as in run_grpo.sh.
export PYTHONPATH=$here/cpu${PYTHONPATH:+:$PYTHONPATH}
export VERL_PLATFORM=cpu VERL_USE_EXTERNAL_MODULES=verl_cpu_platform VERL_ENGINE_DEVICE=cuda
export OMP_NUM_THREADS=1 TORCH_COMPILE_DISABLE=1
export HF_HUB_OFFLINE=1 DO_NOT_TRACK=1 RAY_USAGE_STATS_ENABLED=0 RAY_AUTH_MODE=disabled HYDRA_FULL_ERROR=1

overrides=(
  "model.path='$assets/data/model'"
  model.use_remove_padding=False
  model.enable_gradient_checkpointing=False
  ++model.override_config.attn_implementation=sdpa
  engine.strategy=fsdp2
  engine.use_torch_compile=False
  optim.lr=1e-3

  "data.train_files='$assets/data/conversations.parquet'"
  data.train_batch_size=4
  data.micro_batch_size_per_gpu=2
  data.use_dynamic_bsz=False
  data.max_length=64
  data.num_workers=0

  trainer.device=cpu
  trainer.nnodes=1
  trainer.n_gpus_per_node=1
  trainer.total_epochs=1
  trainer.total_training_steps=4
  trainer.save_freq=-1
  trainer.resume_mode=disable
  trainer.logger=[console]
  "trainer.default_local_dir='$assets/sft_checkpoints'"
  "hydra.run.dir='$assets/hydra'"
)

trainer=${TRAINER:-sft_trainer}
start=("$python" -m torch.distributed.run --standalone --nnodes=1 "--nproc_per_node=${RANKS:-1}")
if [[ $trainer == sft_trainer_ray ]]; then
  start=("$python")
  # Its ray.init() takes no arguments from the configuration, so Ray's own variable sets the machine's resources.
  export RAY_OVERRIDE_RESOURCES='{"CPU": 16, "GPU": 1}'
fi
exec "${start[@]}" -m "verl.trainer.$trainer" "${overrides[@]}" "$@"
