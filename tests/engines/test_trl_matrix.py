"""Sameness with and without captures: every figure that TRL's GRPO logs and every byte that it saves, whatever is
recorded, in each mode: with gradient checkpointing, after a resume, with an adapter of PEFT's, with torch.compile.

Each step is captured, evaluated and saved. Each of the six contents goes with both modes, and each technique too. The
compiler goes without stacks: its Python calls are a gigabyte a step, and a capture that large ends for its size.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import engines, processes
from tests.support.helpers import clean_environment
from tests.support.trl_runs import NAMES, SCRIPT, Ran

# None: what is recorded unless somebody asks for something.
CONTENTS = (None, "cpu,shapes", "cpu,stack", "cpu,shapes,stack", "cpu,memory", "cpu,shapes,stack,memory,flops,module")
# What one process trains, one after the other.
TECHNIQUES = (("checkpointed", "resumed", "adapted"), ("compiled",))
MODES = ("discrete", "continuous")
# Where there are no stacks the techniques take turns.
TABLE = [
    pytest.param(
        contents,
        mode,
        TECHNIQUES[0 if "stack" in (contents or "") else (row + column) % 2],
        id=f"{contents or 'default'}-{mode}",
    )
    for row, contents in enumerate(CONTENTS)
    for column, mode in enumerate(MODES)
]


@pytest.fixture(scope="module", params=NAMES)
def train(
    thorough: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Ran]:
    """Trains in a process of its own, each kind of run once. What torch.compile makes is kept for the next."""
    python = engines.python_of(request.param)
    compiled = str(tmp_path_factory.mktemp("compiled"))

    @functools.cache
    def run(*names: str, **variables: str) -> Ran:
        folder = tmp_path_factory.mktemp("trl")
        environment = clean_environment(OMP_NUM_THREADS="1", TORCHINDUCTOR_CACHE_DIR=compiled, **variables)
        finished = processes.run([python, str(SCRIPT), *names], cwd=folder, env=environment, timeout_s=600)
        assert finished.status == 0, finished.output
        return Ran(folder, finished.output)

    return run


def saved(folder: Path) -> dict[str, str]:
    """The digest of each file of weights or of an optimizer's state in each checkpoint."""
    files = [path for kind in ("*.safetensors", "optimizer.pt") for path in (folder / "out").rglob(kind)]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize(("contents", "mode", "names"), TABLE)
def test_figures_and_checkpoints_are_those_of_the_run_without_autoprof(
    contents: str | None, mode: str, names: tuple[str, ...], train: Callable[..., Ran]
) -> None:
    asked = {"AUTOPROF_CONTENTS": contents} if contents else {}
    on = train(*names, AUTOPROF="1", AUTOPROF_STEPS="::1", AUTOPROF_MODE=mode, **asked)
    off = train(*names)
    for name in names:
        assert on.said[name] == off.said[name]
        # After the resume from the second step, two are left.
        assert len([line for line in off.said[name] if "grad_norm" in line]) == 4
    assert saved(on.folder) == saved(off.folder)
    assert len(saved(on.folder)) >= 8
    assert on.steps() == [1, 2, 3, 4]
    metas: list[dict[str, Any]] = [json.loads(path.read_text()) for path in on.run.glob("global_step_*/*.meta.json")]
    ended = sorted({(meta["stage"], meta["state"], meta["reason"]) for meta in metas})
    print(f"{'+'.join(names)} {mode} {contents or 'default'}: {ended}")
    assert {word for meta in metas for word in meta["contents"]} == set((contents or "cpu").split(","))
    assert {meta["state"] for meta in metas} == {"complete"}
