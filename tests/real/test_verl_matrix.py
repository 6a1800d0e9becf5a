"""What a capture may not change: every figure of real runs of verl and every byte of their checkpoints, whatever is
recorded, however the model is sharded, whether it is offloaded, and in each mode.

Each of the six contents goes with both shardings, offloading or not, both modes, the first steps of a run and those
after a resume: a run has one step for each contents, and each step is validated and leaves a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from verl_runs import VerlRun, verl_run

# None: what is recorded unless somebody asks for something.
CONTENTS = (None, "cpu,shapes", "cpu,stack", "cpu,shapes,stack", "cpu,memory", "cpu,shapes,stack,memory,flops,module")
STEPS = len(CONTENTS)
SHARDINGS = {"fsdp1": ["actor_rollout_ref.actor.strategy=fsdp"], "fsdp2": ["actor_rollout_ref.actor.strategy=fsdp2"]}
ACTOR = "actor_rollout_ref.actor.fsdp_config"
OFFLOAD = [
    f"{ACTOR}.param_offload=True",
    f"{ACTOR}.optimizer_offload=True",
    "actor_rollout_ref.ref.fsdp_config.param_offload=True",
]
EACH_STEP = ["trainer.test_freq=1", "trainer.save_freq=1", "trainer.val_before_train=True"]


@dataclass(frozen=True)
class Cell:
    """A sharding, with offloading or not, and the mode of the first run; the resumed one has the other mode."""

    sharding: str
    offload: bool
    mode: str

    def __str__(self) -> str:
        return f"{self.sharding}-{'offload' if self.offload else 'kept'}"

    def overrides(self, checkpoints: Path) -> list[str]:
        where = [f"trainer.default_local_dir={checkpoints}", "trainer.resume_mode=auto"]
        return [*SHARDINGS[self.sharding], *(OFFLOAD if self.offload else []), *EACH_STEP, *where]


CELLS = [
    Cell("fsdp1", False, "discrete"),
    Cell("fsdp1", True, "continuous"),
    Cell("fsdp2", False, "continuous"),
    Cell("fsdp2", True, "discrete"),
]
MODES = {"discrete": "continuous", "continuous": "discrete"}


@dataclass(frozen=True)
class Pair:
    """A run and the one that goes on from its last checkpoint."""

    first: VerlRun
    resumed: VerlRun
    checkpoints: Path

    def runs(self) -> list[tuple[int, VerlRun]]:
        """Each, and its first step."""
        return [(1, self.first), (1 + STEPS, self.resumed)]


def made(cell: Cell, checkpoints: Path, folder: Path, begin: int, mode: str, on: bool) -> VerlRun:
    """A run in `folder` from step `begin` on; each of its steps is captured with contents of its own."""
    asks = [
        f"--at {begin + number}{f' --contents {contents}' if contents else ''} --rollout-iterations 0:3"
        for number, contents in enumerate(CONTENTS)
    ]
    settings = {"AUTOPROF": "1", "AUTOPROF_STEPS": "", "AUTOPROF_MODE": mode}
    overrides = [*cell.overrides(checkpoints), f"trainer.total_training_steps={begin + STEPS - 1}"]
    return verl_run(folder, *overrides, asks=asks if on else [], **(settings if on else {}))


@pytest.fixture(scope="session")
def pair(thorough: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Cell, bool], Pair]:
    """Runs a cell of the table, with autoprof or without, each once."""

    @cache
    def run(cell: Cell, on: bool) -> Pair:
        folder = tmp_path_factory.mktemp(f"{cell}-{'on' if on else 'off'}")
        checkpoints = folder / "checkpoints"
        runs = []
        for begin, mode in ((1, cell.mode), (1 + STEPS, MODES[cell.mode])):
            place = folder / f"from-{begin}"
            place.mkdir()
            runs.append(made(cell, checkpoints, place, begin, mode, on))
        return Pair(*runs, checkpoints)

    return run


def captures(run: VerlRun) -> dict[int, list[dict[str, Any]]]:
    """What the meta files say, by step."""
    found: dict[int, list[dict[str, Any]]] = {}
    for path in sorted(run.directory.glob("global_step_*/*.meta.json")):
        found.setdefault(int(path.parent.name.rpartition("_")[2]), []).append(json.loads(path.read_text()))
    return found


def digests(checkpoints: Path) -> dict[str, str]:
    """Of each file of each step's checkpoint."""
    files = (path for path in checkpoints.rglob("*") if path.is_file())
    return {str(path.relative_to(checkpoints)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_figures_are_those_of_the_run_without_autoprof(cell: Cell, pair: Callable[[Cell, bool], Pair]) -> None:
    on, off = pair(cell, True), pair(cell, False)
    for (begin, run), (_, without) in zip(on.runs(), off.runs(), strict=True):
        assert set(range(begin, begin + STEPS)) <= set(run.metrics)
        assert run.metrics == without.metrics
        for step in range(begin, begin + STEPS):
            names = run.metrics[step]
            assert {"actor/loss", "actor/grad_norm", "critic/rewards/mean", "training/global_step"} <= set(names)
            assert any(name.startswith("val-") for name in names)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_checkpoints_are_those_of_the_run_without_autoprof(cell: Cell, pair: Callable[[Cell, bool], Pair]) -> None:
    on, off = digests(pair(cell, True).checkpoints), digests(pair(cell, False).checkpoints)
    assert {name.partition("/")[0] for name in on} >= {f"global_step_{step}" for step in range(1, 1 + 2 * STEPS)}
    assert {name: on.get(name) for name in off} == off
    assert set(on) == set(off)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_each_step_was_captured_with_its_contents(cell: Cell, pair: Callable[[Cell, bool], Pair]) -> None:
    for begin, run in pair(cell, True).runs():
        found = captures(run)
        assert sorted(found) == list(range(begin, begin + STEPS))
        for number, contents in enumerate(CONTENTS):
            metas = found[begin + number]
            states = sorted({(meta["role"], meta["stage"], meta["state"], meta["reason"]) for meta in metas})
            print(f"{cell} {run.info['settings']['mode']} step {begin + number} {contents or 'default'}: {states}")
            recorded = {word for meta in metas for word in meta["contents"]}
            assert recorded == set((contents or "cpu").split(","))
            assert {meta["role"] for meta in metas} >= {"actor", "ref", "rollout"} or run is None
            assert {meta["state"] for meta in metas} <= {"complete", "truncated"}
