"""Training loops without a trainer class on the CPU, one after the other in one process: `loops.py KIND...`

The last line of rank 0 is JSON with the number of steps, the losses, and the first imported module of autoprof.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import torch
from torch.utils.data import DataLoader, Dataset

MICRO_BATCHES = 2
STEPS = 3
ZERO = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": MICRO_BATCHES,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
}


class Rows(Dataset[Any]):
    """Data set with enough rows for all steps of all ranks."""

    def __len__(self) -> int:
        return 4 * MICRO_BATCHES * STEPS * int(os.environ.get("WORLD_SIZE", "1"))

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


def without_compiler() -> None:
    """Stop DeepSpeed from compiling an operator for messages between ranks, which takes minutes."""
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def engine() -> list[float]:
    """Run DeepSpeed's own loop: `step` after each micro batch, an evaluation, and a checkpoint."""
    import deepspeed

    deepspeed.init_distributed("gloo")
    model = Model()
    made, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=ZERO)
    losses = []
    for number, batch in enumerate(DataLoader(Rows(), batch_size=4)):
        if number == MICRO_BATCHES * STEPS:
            break
        loss = made(**batch)["loss"]
        made.backward(loss)
        made.step()
        losses.append(loss.item())
        if number == 2 * MICRO_BATCHES - 1:
            made.eval()
            made(**batch)
            made.train()
            made.save_checkpoint("kept")
    return [*losses, made.global_steps]


def accelerated(**options: Any) -> list[float]:
    """Run the loop of accelerate's documentation."""
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=MICRO_BATCHES, **options or {"cpu": True})
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, rows = accelerator.prepare(model, optimizer, DataLoader(Rows(), batch_size=4))
    losses = []
    for number, batch in enumerate(rows):
        with accelerator.accumulate(model):
            loss = model(**batch)["loss"]
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if number == 2 * MICRO_BATCHES - 1:
            accelerator.save_state("saved")
    return losses


def plain() -> list[float]:
    """Run accelerate's loop without `accumulate`: each batch is a step."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, rows = accelerator.prepare(model, optimizer, DataLoader(Rows(), batch_size=4))
    losses = []
    for _, batch in zip(range(STEPS), rows, strict=False):
        loss = model(**batch)["loss"]
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def both() -> list[float]:
    """Run accelerate's loop with DeepSpeed."""
    from accelerate import DeepSpeedPlugin

    config = {**ZERO, "gradient_accumulation_steps": MICRO_BATCHES}
    del config["optimizer"]
    return accelerated(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))


def launched() -> list[float]:
    """Run the loop that `accelerate launch` configures; without a GPU, accelerate needs a backend."""
    from accelerate import InitProcessGroupKwargs

    return accelerated(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])


def trainer() -> list[float]:
    """Run the Trainer of transformers with DeepSpeed; the Trainer counts the steps."""
    from transformers import Trainer, TrainingArguments

    options = TrainingArguments(
        output_dir="out",
        max_steps=STEPS,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=MICRO_BATCHES,
        deepspeed={**ZERO, "optimizer": {**ZERO["optimizer"], "params": {"lr": 1e-3, "torch_adam": True}}},
        use_cpu=True,
        bf16=False,
        report_to=[],
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        learning_rate=1e-3,
        label_names=["labels"],
    )
    made = Trainer(model=Model(), args=options, train_dataset=Rows())
    made.train()
    return [each["loss"] for each in made.state.log_history if "loss" in each]


KINDS = {"engine": engine, "accelerated": accelerated, "plain": plain, "both": both}
KINDS |= {"launched": launched, "trainer": trainer}
if {"engine", "both", "launched", "trainer"} & set(sys.argv):
    without_compiler()
found = {kind: KINDS[kind]() for kind in sys.argv[1:]}
if int(os.environ.get("RANK", "0")) == 0:
    imported = sorted(name for name in sys.modules if name.partition(".")[0] == "autoprof")
    print("\n" + json.dumps({"global_step": STEPS, "losses": found, "autoprof": imported[:1]}))
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
