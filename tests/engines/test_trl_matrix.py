"""Same logged figures and saved files of TRL's GRPO with and without captures.

The table combines six contents and both modes with gradient checkpointing, a resume, an adapter of PEFT, and
torch.compile. Each step is captured, evaluated and saved. torch.compile is not combined with stacks: its Python calls
fill a gigabyte per step, and such a capture ends at its size limit.
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

# Contents of the captures; None stands for the default.
CONTENTS = (None, "cpu,shapes", "cpu,stack", "cpu,shapes,stack", "cpu,memory", "cpu,shapes,stack,memory,flops,module")
# Trainings that one process runs one after the other.
TECHNIQUES = (("checkpointed", "resumed", "adapted"), ("compiled",))
MODES = ("discrete", "continuous")
# Without stacks, the two groups of techniques alternate.
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
    """Return a function that trains in a separate process; each kind of run is made once.

    The cache of torch.compile is shared by all runs.
    """
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
    """Return the digest of each file of weights or optimizer state in the checkpoints."""
    files = [path for kind in ("*.safetensors", "optimizer.pt") for path in (folder / "out").rglob(kind)]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize(("contents", "mode", "names"), TABLE)
def test_figures_and_checkpoints_equal_those_without_autoprof(
    contents: str | None, mode: str, names: tuple[str, ...], train: Callable[..., Ran]
) -> None:
    asked = {"AUTOPROF_CONTENTS": contents} if contents else {}
    on = train(*names, AUTOPROF="1", AUTOPROF_STEPS="::1", AUTOPROF_MODE=mode, **asked)
    off = train(*names)
    for name in names:
        assert on.said[name] == off.said[name]
        # `resumed` begins after step 2, and its log also has the first two steps.
        assert len([line for line in off.said[name] if "grad_norm" in line]) == 4
    assert saved(on.folder) == saved(off.folder)
    assert len(saved(on.folder)) >= 8
    assert on.steps() == [1, 2, 3, 4]
    metas: list[dict[str, Any]] = [json.loads(path.read_text()) for path in on.run.glob("global_step_*/*.meta.json")]
    ended = sorted({(meta["stage"], meta["state"], meta["reason"]) for meta in metas})
    print(f"{'+'.join(names)} {mode} {contents or 'default'}: {ended}")
    assert {word for meta in metas for word in meta["contents"]} == set((contents or "cpu").split(","))
    assert {meta["state"] for meta in metas} == {"complete"}
