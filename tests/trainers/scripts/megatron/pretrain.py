"""Megatron-LM's `pretrain` of a tiny GPT with three iterations on the CPU: `pretrain.py ARGUMENTS`

ARGUMENTS are further arguments of Megatron. Each iteration has two micro batches. A checkpoint follows the second
iteration, an evaluation the third. The last line of rank 0 is JSON with the last iteration, and the first imported
module of autoprof.
"""

from __future__ import annotations

import json
import sys
import typing
from collections.abc import Iterator
from typing import Any

import cuda_as_cpu
import torch
import typing_extensions

# Megatron needs Python 3.12, but uses only this name of it.
vars(typing).setdefault("override", typing_extensions.override)
cuda_as_cpu.uncompiled()
cuda_as_cpu.enter()

from megatron.core.datasets import utils
from megatron.core.enums import ModelType
from megatron.core.tensor_parallel import random
from megatron.training import get_args, pretrain, training
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

LENGTH, VOCABULARY, BATCH = 8, 63, 2
ARGUMENTS = f"""
    --hidden-size 16 --num-attention-heads 2 --seq-length {LENGTH} --max-position-embeddings {LENGTH}
    --micro-batch-size {BATCH} --global-batch-size {2 * BATCH} --train-iters 3 --lr 0.01 --min-lr 0.001
    --transformer-impl local --attention-backend unfused --distributed-backend gloo --dataloader-type external
    --tokenizer-type NullTokenizer --vocab-size {VOCABULARY} --no-persist-layer-norm --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion
    --save kept --save-interval 2 --ckpt-format torch --eval-interval 3 --eval-iters 1 --log-interval 1
    --rerun-mode disabled --no-check-for-nan-in-loss-and-grad
"""
# Disable functions that need a compiler or a GPU: indices of data sets, warm-up of kernels, the device's random state.
utils.compile_helpers = lambda: None
training.set_jit_fusion_options = lambda **_: None
random._set_cuda_rng_state = lambda *_, **__: None


def rows() -> Iterator[torch.Tensor]:
    while True:
        yield torch.randint(0, VOCABULARY, (BATCH, LENGTH))


def datasets(numbers: Any, vp_stage: int | None = None) -> Any:
    return rows(), rows(), rows()


datasets.is_distributed = True  # type: ignore[attr-defined]


def loss_of(losses: torch.Tensor) -> Any:
    return losses.mean(), {"lm loss": losses.detach().mean()}


def forward(data: Iterator[torch.Tensor], model: Any) -> Any:
    tokens = next(data)
    places = torch.arange(LENGTH).expand(BATCH, LENGTH)
    return model(tokens, places, None, labels=tokens.roll(-1, 1)), loss_of


sys.argv[1:] = [*ARGUMENTS.split(), *sys.argv[1:]]
arguments = parse_and_validate_args()
whole = pretrain_cfg_container_from_args(arguments, gpt_config_from_args(arguments))
pretrain(whole, datasets, ModelType.encoder_or_decoder, forward)
if torch.distributed.get_rank() == 0:
    imported = sorted(name for name in sys.modules if name.partition(".")[0] == "autoprof")
    print("\n" + json.dumps({"global_step": get_args().curr_iteration + 1, "autoprof": imported[:1]}))
torch.distributed.destroy_process_group()
