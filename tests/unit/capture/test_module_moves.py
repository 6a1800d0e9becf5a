"""Modules that move while shapes are recorded: torch refuses to swap parameters that a recording refers to."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import helpers, packages
from tests.support.helpers import WHOLE_TORCH, Python
from tests.support.recipe_texts import recipe

# Like verl's workers with `param_offload` (verl 0.9.1, fsdp_utils.py), it swaps parameters before and after an update.
TRAINER = f"""
import os
{WHOLE_TORCH}
from torch.distributed.fsdp import fully_shard

class Trainer:
    def __init__(self):
        torch.manual_seed(0)
        os.environ |= {{"RANK": "0", "WORLD_SIZE": "1"}}
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        self.number = 0
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
        fully_shard(self.model[0])
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def train_step(self):
        self.number += 1
        figure = self.update()
        self.model.to("cpu")
        return figure

    def update(self):
        self.model.to("cpu")
        loss = self.model(torch.ones(4, 8)).sum()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.number % 2:
            self.model.to("cpu")
        return round(loss.item(), 5), round(norm.full_tensor().item(), 5)
"""
STAGE = ("b", "Trainer.update", "stage", 'stage = "update", role = "actor"')
RECIPE = recipe("sharded", ("a", "Trainer.train_step", "step.wrap", ""), STAGE)
CODE = """
import sharded
trainer = sharded.Trainer()
print([trainer.train_step() for _ in range(6)])
sharded.torch.distributed.destroy_process_group()
"""


@pytest.fixture(scope="module")
def off(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the output of training without autoprof."""
    packages.need("torch")
    folder = tmp_path_factory.mktemp("off")
    (folder / "sharded.py").write_text(TRAINER)
    return helpers.run([sys.executable, "-c", CODE], cwd=folder, check=True).stdout


@pytest.fixture
def trained(off: str, python: Python, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Train with autoprof and compare the figures. Return the meta files of the captures."""
    (tmp_path / "sharded.py").write_text(TRAINER)
    (tmp_path / "sharded.toml").write_text(RECIPE)

    def train(**variables: str) -> list[dict[str, Any]]:
        on = python(CODE, AUTOPROF="1", AUTOPROF_RECIPES="sharded.toml", AUTOPROF_STEPS="2:5", **variables)
        assert on.stdout == off
        metas = sorted((tmp_path / "autoprof_runs").glob("latest/global_step_*/*.meta.json"))
        assert metas
        return [json.loads(path.read_text()) for path in metas]

    return train


# Each mode and each content once; all combinations with --thorough.
@pytest.mark.parametrize("mode", ["discrete", "continuous"])
@pytest.mark.parametrize("contents", ["cpu,shapes", "cpu,shapes,stack,memory,flops,module"])
@pytest.mark.fault(
    "parameters are swapped while shapes are recorded", "goes on", "the trace from there on; `truncated`"
)
def test_modules_move_while_shapes_are_recorded(
    trained: Any, contents: str, mode: str, request: pytest.FixtureRequest
) -> None:
    if ("stack" in contents) != (mode == "continuous"):
        request.getfixturevalue("thorough")
    metas = trained(AUTOPROF_CONTENTS=contents, AUTOPROF_MODE=mode)
    assert all(meta["left_out"] == ["torch.module-moves"] for meta in metas)
    # The operators of the first move are not recorded. The move after the optimizer's step ends the recording. Without
    # such a move in the stage, the trace of the stage is complete.
    assert all("the program swaps a parameter" in meta["reason"] for meta in metas if meta["state"] == "truncated")
    states = {meta["step"]: meta["state"] for meta in metas}
    assert states[3] == "truncated"
    assert mode == "continuous" or states[2] == states[4] == "complete"


def test_nothing_is_lost_where_no_shapes_are_recorded(trained: Any) -> None:
    assert [(meta["state"], meta["left_out"]) for meta in trained(AUTOPROF_CONTENTS="cpu,stack")] == [
        ("complete", [])
    ] * 3


# A recording with stacks alone refers to the optimizer's state and to plain parameters.
def test_plain_parameters_are_swapped_while_stacks_are_recorded(python: Python, tmp_path: Path) -> None:
    code = f"""
    {WHOLE_TORCH}
    torch.__future__.set_swap_module_params_on_conversion(True)
    class Trainer:
        number = 0
        def __init__(self):
            self.model = torch.nn.Linear(4, 4)
            self.optimizer = torch.optim.AdamW(self.model.parameters())
        def update(self):
            self.model(torch.ones(2, 4)).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.model.double().float()
        def train_step(self):
            self.number += 1
            self.update()
    """
    (tmp_path / "sharded.py").write_text("\n".join(line[4:] for line in code.splitlines()))
    (tmp_path / "sharded.toml").write_text(RECIPE)
    run = "import sharded; trainer = sharded.Trainer(); [trainer.train_step() for _ in range(3)]; print('end')"
    variables = {"AUTOPROF_RECIPES": "sharded.toml", "AUTOPROF_STEPS": "2", "AUTOPROF_CONTENTS": "cpu,stack,shapes"}
    assert python(run, AUTOPROF="1", **variables).stdout == "end\n"
