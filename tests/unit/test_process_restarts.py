"""Ranks that torchrun restarts: both attempts are in the run, under their own pids."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.helpers import processes_of
from tests.support.small_trainer import metas, torchrun

SCRIPT = """
from small import *

def inside():
    # In the first attempt, rank 1 dies during the window, once rank 0 is in it too.
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        if os.environ["RANK"] == "1":
            while not os.path.exists("there"):
                time.sleep(0.02)
            os._exit(1)
        open("there", "w").close()
        time.sleep(60)  # until torchrun ends it

Trainer().fit(inside)
"""


@pytest.mark.fault("torchrun restarts ranks", "continues", "the capture of the dead rank")
def test_restarted_ranks_overwrite_nothing(tmp_path: Path) -> None:
    run = torchrun(tmp_path, SCRIPT, "--max-restarts", "1", AUTOPROF_STEPS="2")
    assert run.info.pid in {process["parent"] for process in processes_of(Path(run.path))}
    # In the first attempt, both ranks end during the window, so their captures stay unfinished.
    assert sorted((capture.state, capture.name.split(".")[2]) for capture in run.captures) == [
        ("complete", "rank0"),
        ("complete", "rank1"),
        ("unfinished", "rank0"),
        ("unfinished", "rank1"),
    ]
    assert len({capture.name.rpartition("pid")[2] for capture in run.captures}) == 4
    assert {meta["state"] for meta in metas(tmp_path)} == {"complete"}
