"""Real Ray actors that die in a step: the run names the one that did, and not those that Ray ended with the driver."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from autoprof.rundir import death_words, deaths, runs
from tests.support import processes
from tests.support.helpers import clean_environment
from tests.support.ray_clusters import SCRIPTS

IN_UPDATE = "in update_actor of step 2"


@pytest.mark.fault(
    "a Ray actor is killed, crashes, raises", "ended as without autoprof", "nothing; doctor says who died"
)
@pytest.mark.parametrize(
    ("how", "status", "text"),
    [
        (
            "killed",
            1,
            f"actor rank 0 is gone {IN_UPDATE} without a word: it was killed by a signal, or left by os._exit",
        ),
        ("crashed", 1, f"actor rank 0 crashed (SIGSEGV) {IN_UPDATE}: dying.py:18 <lambda>"),
        ("raised", 1, f"actor rank 0 ended by ValueError: no score in dying.py:13 fetch_score, {IN_UPDATE}"),
        ("healthy", 0, ""),
    ],
)
def test_the_actor_is_named_that_died(thorough: None, tmp_path: Path, how: str, status: int, text: str) -> None:
    settings = {"AUTOPROF": "1", "AUTOPROF_STEPS": "", "AUTOPROF_RECIPES": str(SCRIPTS / "dying.toml")}
    command = [sys.executable, str(SCRIPTS / "dying.py"), how]
    ended = processes.run(command, cwd=tmp_path, env=clean_environment(**settings), timeout_s=300)
    assert ended.status == status, ended.output[-3000:]
    found = deaths.of_run(runs.find(tmp_path / "autoprof_runs", "latest"))
    assert (death_words.text(found[0]) if found else "") == text
    # What follows from it: the trainer's exception, and no actor that Ray ended with the driver.
    assert {death.how for death in found[1:]} <= {deaths.EXCEPTION}
