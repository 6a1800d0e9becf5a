"""torchtitan's Trainer with its debug model of Llama 3, reduced to one layer, for three steps on the CPU.

Each step has two micro batches. A checkpoint follows the second and the last step, a validation of one batch the first
and the last step. The last line is JSON with the last step, and the first imported module of autoprof.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cuda_as_cpu
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

cuda_as_cpu.uncompiled()
cuda_as_cpu.without("torch.utils.tensorboard")

from torchtitan.tools import utils

# Set before other modules of torchtitan import these values.
utils.device_type, utils.device_module = "cpu", torch.cpu

from torchtitan.components import metrics
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.llama3.config_registry import llama3_debugmodel_ce_loss

WORDS = ["<s>", "</s>", "the", "cat", "sat", "on", "a", "mat", "and", "saw", "another", "dog"]


class Memory:
    """Stand-in for the figures of CUDA's allocator."""

    device_name = "CPU"

    def get_peak_stats(self) -> Any:
        return metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)

    def reset_peak_stats(self) -> None: ...


def attention(query: Any, key: Any, value: Any, **_: Any) -> Any:
    """Replace flex attention, which has no backward pass on a CPU."""
    found = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return found, SimpleNamespace(lse=None)


torch.cpu.current_device = lambda: 0
metrics.build_device_memory_monitor = Memory
FlexAttention._compiled_flex_attn = staticmethod(attention)
if not hasattr(torch.distributed, "set_timeout"):  # only in torch newer than 2.13
    torch.distributed.set_timeout = lambda *_: None

# Make a tokenizer, and the data set `c4_test`, which only torchtitan's repository contains.
tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="the"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
texts, rows = Path("tokenizer"), Path("tests/assets/c4_test")
for folder in (texts, rows):
    folder.mkdir(parents=True)
tokenizer.save(str(texts / "tokenizer.json"))
(texts / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
made = [" ".join(WORDS[2 + row * place % 9] for place in range(1, 60)) for row in range(100)]
(rows / "data.json").write_text("".join(json.dumps({"text": text}) + "\n" for text in made))

config = llama3_debugmodel_ce_loss()
config.model_spec.model.layers = config.model_spec.model.layers[:1]
config.hf_assets_path = str(texts)
config.dump_folder = "out"
config.compile.enable = False
training, checkpoint, validator = config.training, config.checkpoint, config.validator
training.steps, training.seq_len, training.local_batch_size, training.global_batch_size = 3, 16, 2, 4
training.disable_cuda_graphs = True
checkpoint.enable, checkpoint.interval = True, 2
validator.enable, validator.freq, validator.steps = True, 3, 1
validator.dataloader.dataset = "c4_test"

trainer = config.build()
trainer.train()
trainer.close()
torch.distributed.destroy_process_group()
imported = sorted(name for name in sys.modules if name.partition(".")[0] == "autoprof")
print("\n" + json.dumps({"global_step": trainer.step, "autoprof": imported[:1]}))
