"""Ranks that torchrun starts anew: both attempts are in the run, under their own pids."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import wrapt
from helpers import clean_environment
from small_trainer import metas, prepare

from autoprof import listing

SCRIPT = """
from small import *

def inside():
    # The second rank dies in the window, in the first attempt.
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        if os.environ["RANK"] == "1":
            os._exit(1)
        time.sleep(60)  # until torchrun ends it

Trainer().fit(inside)
"""


@pytest.mark.fault("torchrun starts ranks anew", "goes on", "the dead rank's capture")
def test_ranks_that_are_started_anew_overwrite_nothing(tmp_path: Path) -> None:
    prepare(tmp_path, lambda *_, **__: None)  # type: ignore[arg-type,return-value]
    (tmp_path / "train.py").write_text(SCRIPT)
    lib = tmp_path / "lib"
    environment = clean_environment(
        AUTOPROF="1",
        AUTOPROF_STEPS="2",
        AUTOPROF_RANKS="all",
        AUTOPROF_RECIPES=str(lib / "small.toml"),
        OMP_NUM_THREADS="1",
        # The launcher imports autoprof's dependencies before all of `site` is through.
        PYTHONPATH=f"{lib}:{Path(wrapt.__file__).parent.parent}",
    )
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    done = subprocess.run(
        [sys.executable, "-m", *torchrun, "train.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (run,) = listing.runs(tmp_path / "autoprof_runs")
    assert run.state == "ended"
    hooks = [json.loads(path.read_text()) for path in Path(run.path, "hooks").glob("*.json")]
    assert run.info["pid"] in {process["parent"] for process in hooks}
    # In the first attempt both ranks were ended in the window, which is what the names say that they had taken.
    assert sorted((capture.state, capture.name.split(".")[2]) for capture in run.captures) == [
        ("complete", "rank0"),
        ("complete", "rank1"),
        ("unfinished", "rank0"),
        ("unfinished", "rank1"),
    ]
    assert len({capture.name.rpartition("pid")[2] for capture in run.captures}) == 4
    assert {meta["state"] for meta in metas(tmp_path)} == {"complete"}
