"""Trainer of transformers with the methods that Unsloth replaces on a GPU: `replaced.py PACKAGES`

Unsloth can't be imported without a GPU. This script copies the functions that replace methods, and the functions that
they use, unchanged from Unsloth's source into a package with the same name.
"""

from __future__ import annotations

import ast
import importlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

PACKAGES = Path(sys.argv[1])
NEEDED = """
import ast, contextlib, functools, inspect, os, re, textwrap, torch
from transformers.utils import logging
from ._gc_train_scope import patch_trainer_train_gc_scope as _patch_trainer_train_gc_scope
logger = logging.get_logger(__name__)
"""
# Functions that replace methods. The functions that they use are added.
FUNCTIONS = {"patch_gradient_accumulation_fix", "_unsloth_pre_compute_loss", "_unsloth_train_if_needed"}
LEFT_OUT = """
def patch_fla_autotuner_fast_path(): ...
def apply_accepts_loss_kwargs_fix(model): ...
def clean_gpu_cache(): ...
def _unsloth_get_batch_samples(trainer, *args, **kwargs):
    return trainer.get_batch_samples_of_transformers(*args, **kwargs)
"""
STANDING_IN = {"patch_fla_autotuner_fast_path", "apply_accepts_loss_kwargs_fix"}
LOOP_BEGIN = "        try:\n            if Trainer._inner_training_loop.__name__"
LOOP_END = "        Trainer._inner_training_loop = _fast_inner_training_loop\n"


def cut() -> str:
    """Return the functions of Unsloth that replace methods of the Trainer."""
    utils = (PACKAGES / "unsloth" / "models" / "_utils.py").read_text()
    defined = {}
    for node in ast.parse(utils).body:
        if isinstance(node, ast.FunctionDef):
            defined[node.name] = node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            defined[node.targets[0].id] = node
    wanted, seen = set(FUNCTIONS), set()
    while wanted:
        name = wanted.pop()
        seen.add(name)
        wanted |= {each.id for each in ast.walk(defined[name]) if isinstance(each, ast.Name)} & defined.keys()
        wanted -= seen | STANDING_IN | {"logger"}
    functions = [ast.get_source_segment(utils, node) for name, node in defined.items() if name in seen]
    llama = (PACKAGES / "unsloth" / "models" / "llama.py").read_text()
    begin = llama.index(LOOP_BEGIN)
    # Keep the indentation, because the code cuts its own source lines by it.
    loop = "def replace_loop(Trainer):\n" + llama[begin : llama.index(LOOP_END, begin)] + LOOP_END
    return "\n\n".join([NEEDED, LEFT_OUT, *map(str, functions), loop])


folder = Path("made") / "unsloth" / "models"
folder.mkdir(parents=True)
(folder / "_utils.py").write_text(cut())
shutil.copy(PACKAGES / "unsloth" / "models" / "_gc_train_scope.py", folder)
for package in (folder, folder.parent):
    (package / "__init__.py").write_text("")
sys.path.insert(0, "made")
_utils = importlib.import_module("unsloth.models._utils")


class Rows(Dataset):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        inputs = torch.randn(4, generator=torch.Generator().manual_seed(number))
        return {"inputs": inputs, "labels": inputs.sum(0, keepdim=True)}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor, **others: Any) -> dict[str, torch.Tensor]:
        return {"loss": torch.nn.functional.mse_loss(self.layer(inputs), labels)}


methods = ("training_step", "compute_loss", "_inner_training_loop")
# Skip Unsloth's changes of `Trainer.__init__`, which are for its own models and for devices.
Trainer._unsloth_init_wrapped_for_accelerate_gas = True
Trainer.get_batch_samples_of_transformers = Trainer.get_batch_samples
_utils.replace_loop(Trainer)
_utils.patch_gradient_accumulation_fix(Trainer)


def innermost(name: str) -> str:
    function = Trainer.__dict__[name]
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function.__name__


options = TrainingArguments(
    output_dir="out",
    max_steps=3,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    use_cpu=True,
    bf16=False,
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
    label_names=["labels"],
)
made = Trainer(model=Model(), args=options, train_dataset=Rows())
made.train()
print(
    "\n" + json.dumps({"global_step": made.state.global_step, "replaced": {name: innermost(name) for name in methods}})
)
