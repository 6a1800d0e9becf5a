"""Loop without a trainer class over accelerate's data loader, with a recipe of blocks and items for two targets."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support import helpers
from tests.support.helpers import processes_of, spans

LOOP = """
import sys
import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard
from torch.utils.data import DataLoader

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters())
loader = DataLoader([torch.ones(4) for _ in range(8)], batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
assert type(loader) is DataLoaderShard
for batch in loader:
    with accelerator.accumulate(model):
        accelerator.backward(model(batch).mean())
        optimizer.step()
        optimizer.zero_grad()
"""
RECIPE = """
[[recipe]]
target = "accelerate"

[[recipe.hook]]
name = "step"
module = "accelerate.data_loader"
attribute = "DataLoaderShard.__iter__"
around = "next"
behaviour = "step.tick"

[[recipe.hook]]
name = "micro-batch"
module = "accelerate.accelerator"
attribute = "Accelerator.accumulate"
around = "with"
behaviour = "stage"
options = { stage = "micro_batch", role = "actor" }

[[recipe]]
target = "torch"

[[recipe.hook]]
name = "data"
module = "torch.utils.data.dataloader"
attribute = "DataLoader.__iter__"
around = "next"
behaviour = "span"
options = { stage = "data", role = "data" }
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loop")
    (folder / "loop.py").write_text(LOOP)
    (folder / "accelerate+torch.toml").write_text(RECIPE)
    on = {"AUTOPROF": "1", "AUTOPROF_STEPS": "2", "AUTOPROF_RECIPES": "accelerate+torch.toml"}
    done = helpers.run([sys.executable, "loop.py"], cwd=folder, timeout_s=600, **on)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_items_of_a_loader_are_steps_and_its_blocks_are_stages(folder: Path) -> None:
    found = [(span["name"], span["step"]) for span in spans(folder / "autoprof_runs" / "latest")]
    steps = [each for each in found if each[0] in ("micro_batch", "step")]
    assert steps == [(name, number) for number in range(1, 5) for name in ("micro_batch", "step")]
    # accelerate requests one batch ahead, and then the end of the iterator: 4 batches and the end.
    assert [name for name, _ in found].count("data") == 5


def test_a_with_block_is_captured_as_a_stage(folder: Path) -> None:
    step = folder / "autoprof_runs" / "latest" / "global_step_000002"
    (meta,) = step.glob("*.meta.json")
    content = json.loads(meta.read_text())
    assert (content["state"], content["stage"]) == ("complete", "micro_batch")
    assert [path.name for path in (folder / "autoprof_runs" / "latest").glob("global_step_*")] == [step.name]


def test_nothing_went_wrong(folder: Path) -> None:
    (process,) = processes_of(folder / "autoprof_runs" / "latest")
    assert process["errors"] == {}
    called = {key: hook["state"] for key, hook in process["hooks"].items() if hook["called"]}
    # Hooks of the recipe for accelerate that autoprof ships are called too.
    assert (
        called.items()
        >= {"accelerate/step": "applied", "accelerate/micro-batch": "applied", "torch/data": "applied"}.items()
    )
