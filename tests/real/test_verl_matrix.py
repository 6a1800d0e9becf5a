"""Same figures and checkpoints of real verl runs with and without captures.

The runs combine six contents, both shardings, offloading on and off, both modes, and the steps before and after a
resume. Each run has one step for each of the six contents; each step is validated and saves a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.real.run_table import OFFLOAD
from tests.support.verl_runs import Ask, VerlRun, verl_run

# Contents of each step; None stands for the default. The last trace must be small, because Ray kills workers that are
# still writing at the end.
CONTENTS = ("cpu,shapes,stack", "cpu,shapes,stack,memory,flops,module", "cpu,shapes", "cpu,stack", "cpu,memory", None)
STEPS = len(CONTENTS)
SHARDINGS = {"fsdp1": ["actor_rollout_ref.actor.strategy=fsdp"], "fsdp2": ["actor_rollout_ref.actor.strategy=fsdp2"]}
EACH_STEP = ["trainer.test_freq=1", "trainer.save_freq=1", "trainer.val_before_train=True"]


@dataclass(frozen=True)
class Cell:
    """Sharding, offloading, and the mode of the first run; the resumed run uses the other mode."""

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
    """Run, and the run that resumes from its last checkpoint."""

    first: VerlRun
    resumed: VerlRun
    checkpoints: Path

    def runs(self) -> list[tuple[int, VerlRun]]:
        """Return each run with the number of its first step."""
        return [(1, self.first), (1 + STEPS, self.resumed)]


def made(cell: Cell, checkpoints: Path, folder: Path, begin: int, mode: str, on: bool) -> VerlRun:
    """Make a run in `folder` from step `begin` on; if `on`, each step is captured with other contents."""
    asks = [
        Ask(f"--at {begin + number}{f' --contents {contents}' if contents else ''} --rollout-iterations 0:3")
        for number, contents in enumerate(CONTENTS)
    ]
    settings = {"AUTOPROF": "1", "AUTOPROF_STEPS": "", "AUTOPROF_MODE": mode}
    overrides = [*cell.overrides(checkpoints), f"trainer.total_training_steps={begin + STEPS - 1}"]
    return verl_run(folder, *overrides, asks=asks if on else [], **(settings if on else {}))


@pytest.fixture(scope="session")
def pair(thorough: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Cell, bool], Pair]:
    """Return a function that makes the runs of a cell, with or without autoprof, once."""

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
    """Return the meta files, by step."""
    found: dict[int, list[dict[str, Any]]] = {}
    for path in sorted(run.directory.glob("global_step_*/*.meta.json")):
        found.setdefault(int(path.parent.name.rpartition("_")[2]), []).append(json.loads(path.read_text()))
    return found


def digests(checkpoints: Path) -> dict[str, str]:
    """Return digests of the tensors in each checkpoint, and of the other files without states of random generators.

    The files around the tensors can't be compared: they name FSDP2's mesh differently in each run (torch 2.13).
    """
    found: dict[str, str] = {}
    for path in checkpoints.rglob("*"):
        name = str(path.relative_to(checkpoints))
        if path.suffix == ".pt" and path.parent.name == "actor" and not path.name.startswith("extra_state"):
            with zipfile.ZipFile(path) as archive:
                tensors = [member for member in archive.namelist() if "/data/" in member]
                found |= {f"{name}:{member}": hashlib.sha256(archive.read(member)).hexdigest() for member in tensors}
        elif path.is_file() and path.suffix != ".pt":
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def generators(checkpoints: Path) -> set[tuple[str, ...]]:
    """Return the different states of the random generators of torch, numpy and Python in the checkpoints.

    verl 0.9.1 does not seed them, so each run has other states. Training with these settings draws no random number.
    """
    import torch

    states = [torch.load(path, weights_only=False)["rng"] for path in checkpoints.rglob("extra_state*.pt")]
    return {(str(state["cpu"].tolist()), str(state["numpy"][1].tolist()), str(state["random"])) for state in states}


@pytest.mark.fault(
    "FSDP2 moves modules (offloading, a checkpoint) while shapes are recorded, which torch does not allow",
    "continues, with the same figures",
    "the trace after the last use of the parameters in the stage; the meta file says why",
)
def test_modules_move_while_shapes_are_recorded(faulty: VerlRun, v1_off: VerlRun) -> None:
    for step in (3, 4):
        # Offloading changes no figure.
        assert faulty.metrics[step] == v1_off.metrics[step]
        metas = captures(faulty)[step]
        ended = {meta["stage"]: meta for meta in metas if meta["role"] == "actor"}
        assert ("save_checkpoint" in ended) == (step == 4)
        for stage in ended.keys() - {"compute_log_prob"}:
            assert ended[stage]["state"] == "truncated"
            assert "swaps a parameter" in ended[stage]["reason"]
        others = [meta for meta in metas if meta["role"] != "actor" or meta["stage"] == "compute_log_prob"]
        assert {meta["state"] for meta in others} == {"complete"}
        # The move before the update did not end the capture, which lasts to the end of the update.
        operators = [
            event
            for event in faulty.trace(step, "actor.update_actor")["traceEvents"]
            if event.get("cat") in ("cpu_op", "user_annotation")
        ]
        assert any(event["name"].startswith("Optimizer.step") for event in operators)
        assert any("Input Dims" in event.get("args", {}) for event in operators)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_figures_equal_those_without_autoprof(cell: Cell, pair: Callable[[Cell, bool], Pair]) -> None:
    on, off = pair(cell, True), pair(cell, False)
    for (begin, run), (_, without) in zip(on.runs(), off.runs(), strict=True):
        assert set(range(begin, begin + STEPS)) <= set(run.metrics)
        assert run.metrics == without.metrics
        for step in range(begin, begin + STEPS):
            names = run.metrics[step]
            assert {"actor/loss", "actor/grad_norm", "critic/rewards/mean", "training/global_step"} <= set(names)
            assert any(name.startswith("val-") for name in names)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_checkpoints_equal_those_without_autoprof(cell: Cell, pair: Callable[[Cell, bool], Pair]) -> None:
    on, off = digests(pair(cell, True).checkpoints), digests(pair(cell, False).checkpoints)
    assert {name.partition("/")[0] for name in on} >= {f"global_step_{step}" for step in range(1, 1 + 2 * STEPS)}
    assert {name: on.get(name) for name in off} == off
    assert set(on) == set(off)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_no_random_number_is_drawn(cell: Cell, pair: Callable[[Cell, bool], Pair]) -> None:
    for on in (False, True):
        assert len(generators(pair(cell, on).checkpoints)) == 1


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_each_step_was_captured_with_its_contents(cell: Cell, pair: Callable[[Cell, bool], Pair]) -> None:
    for begin, run in pair(cell, True).runs():
        found = captures(run)
        assert sorted(found) == list(range(begin, begin + STEPS))
        for number, contents in enumerate(CONTENTS):
            metas = found[begin + number]
            states = sorted({(meta["role"], meta["stage"], meta["state"], meta["reason"]) for meta in metas})
            print(f"{cell} {run.fields['settings']['mode']} step {begin + number} {contents or 'default'}: {states}")
            recorded = {word for meta in metas for word in meta["contents"]}
            assert recorded == set((contents or "cpu").split(","))
            assert {role for meta in metas for role in meta["role"].split("+")} == {
                "actor",
                "ref",
                "rollout",
                "trainer",
            }
            for meta in metas:
                swapped = meta["state"] == "truncated" and "swaps a parameter" in meta["reason"]
                assert meta["state"] == "complete" or (swapped and cell.sharding == "fsdp2" and "shapes" in recorded)
