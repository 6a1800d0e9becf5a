"""Trainings with Lightning on the CPU, each under one of its two names: `fit.py automatic|manual`

The last line is JSON with the Trainer's last step, the losses, the seconds of each training step by the program's own
clock, and the first imported module of autoprof.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

KIND = sys.argv[1]
if KIND == "automatic":
    import lightning as pl
    from lightning.pytorch.callbacks import ModelCheckpoint
else:
    import pytorch_lightning as pl
    from pytorch_lightning.callbacks import ModelCheckpoint


class Small(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.losses: list[float] = []
        self.took: list[float] = []

    def loss(self, batch: Any) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        begin = time.perf_counter()
        # A step that takes as long as a small model's.
        time.sleep(0.05)
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.took.append(time.perf_counter() - begin)
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Manual(Small):
    """Model with manual optimisation and two optimizers; the second one steps with every other batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, number: int) -> None:
        begin = time.perf_counter()
        time.sleep(0.05)
        first, second = self.optimizers()
        loss = self.loss(batch) + self.other(batch[1]).square().mean()
        self.losses.append(loss.item())
        self.manual_backward(loss)
        for optimizer in [first, second] if number % 2 else [first]:
            optimizer.step()
            optimizer.zero_grad()
        self.took.append(time.perf_counter() - begin)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(layer.parameters(), lr=0.01) for layer in (self.layer, self.other)]


def loader(count: int) -> DataLoader[Any]:
    made = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, 4, generator=made)
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4)


def fit(model: Small, resumed: str | None = None, **options: Any) -> pl.Trainer:
    keep = ModelCheckpoint(dirpath="kept", save_last=True, save_top_k=0)
    trainer = pl.Trainer(
        accelerator="cpu",
        callbacks=[keep],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(model, loader(32), loader(8), ckpt_path=resumed)
    return trainer


torch.manual_seed(0)
if KIND == "automatic":
    # Two ranks and two steps per epoch, with two batches each. The second epoch is a resumed run.
    two = {"strategy": "ddp", "devices": 2, "accumulate_grad_batches": 2}
    model = Small()
    fit(model, max_epochs=1, **two)
    trainer = fit(model, resumed="kept/last.ckpt", max_epochs=2, **two)
else:
    model = Manual()
    trainer = fit(model, devices=1, max_steps=4)
if trainer.is_global_zero:
    imported = sorted(name for name in sys.modules if name.partition(".")[0] == "autoprof")
    said = {"global_step": trainer.global_step, "losses": model.losses, "took": model.took, "autoprof": imported[:1]}
    print(json.dumps(said))
