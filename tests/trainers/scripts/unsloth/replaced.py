"""The Trainer of transformers with what Unsloth puts in its place on a GPU: `replaced.py PACKAGES`.

Unsloth itself can't be imported without a GPU but for tests of its own. Its functions that replace methods are taken
from its source as they are, with those that they refer to, and stand in a package of the same name.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

PACKAGES = Path(sys.argv[1])
NEEDED = "import functools, inspect, logging, os, re\nlogger = logging.getLogger(__name__)\n"
# With others that text calls which they make.
FUNCTIONS = {"patch_gradient_accumulation_fix", "_unsloth_pre_compute_loss", "_unsloth_train_if_needed"}
LEFT_OUT = "def patch_fla_autotuner_fast_path(): ...\ndef apply_accepts_loss_kwargs_fix(model): ...\n"
LOOP_BEGIN = "        try:\n            if Trainer._inner_training_loop.__name__"
LOOP_END = "        Trainer._inner_training_loop = _fast_inner_training_loop\n"


def cut() -> str:
    """Return the functions of Unsloth that replace methods of the Trainer."""
    utils = (PACKAGES / "unsloth" / "models" / "_utils.py").read_text()
    defined = {node.name: node for node in ast.parse(utils).body if isinstance(node, ast.FunctionDef)}
    wanted, seen = set(FUNCTIONS), set()
    while wanted:
        name = wanted.pop()
        seen.add(name)
        names = {node.id for node in ast.walk(defined[name]) if isinstance(node, ast.Name)}
        wanted |= (names & defined.keys()) - seen - {"patch_fla_autotuner_fast_path", "apply_accepts_loss_kwargs_fix"}
    functions = [ast.get_source_segment(utils, node) for name, node in defined.items() if name in seen]
    llama = (PACKAGES / "unsloth" / "models" / "llama.py").read_text()
    begin = llama.index(LOOP_BEGIN)
    # As far to the right as it is there: lines of its texts are cut by that.
    loop = "def replace_loop(Trainer):\n" + llama[begin : llama.index(LOOP_END, begin)] + LOOP_END
    return "\n\n".join([NEEDED, LEFT_OUT, *map(str, functions), loop])


folder = Path("made") / "unsloth" / "models"
folder.mkdir(parents=True)
(folder / "_utils.py").write_text(cut())
for package in (folder, folder.parent):
    (package / "__init__.py").write_text("")
sys.path.insert(0, "made")

import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments
from unsloth.models import _utils


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

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": torch.nn.functional.mse_loss(self.layer(inputs), labels)}


methods = ("training_step", "compute_loss", "_inner_training_loop")
before = {name: Trainer.__dict__[name].__code__.co_filename for name in methods}
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
print("\n" + json.dumps({"global_step": made.state.global_step, "replaced": {name: innermost(name) for name in methods}}))
