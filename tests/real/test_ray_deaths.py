"""Real Ray actors that die in a step. The run names the actor that died, not the actors that Ray ended afterwards."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from autoprof.rundir import deaths, runs
from tests.support import processes
from tests.support.helpers import clean_environment
from tests.support.ray_clusters import SCRIPTS

IN_UPDATE = "in update_actor of step 2"


def line(text: str) -> str:
    """Return file and line of this text in the script."""
    lines = (SCRIPTS / "dying.py").read_text().splitlines()
    return f"dying.py:{next(number for number, each in enumerate(lines, 1) if text in each)}"


@pytest.mark.fault(
    "a Ray actor is killed, crashes, raises", "ends as without autoprof", "nothing; doctor names the actor"
)
@pytest.mark.parametrize(
    ("how", "status", "text"),
    [
        ("killed", 1, f"actor rank 0 vanished {IN_UPDATE} (killed by a signal, or ended by os._exit)"),
        ("crashed", 1, f"actor rank 0 crashed (SIGSEGV) {IN_UPDATE}: {line('string_at')} <lambda>"),
        (
            "raised",
            1,
            f"actor rank 0 failed with ValueError: no score in {line('ValueError')} fetch_score, {IN_UPDATE}",
        ),
        ("healthy", 0, ""),
    ],
)
def test_the_actor_that_died_is_named(thorough: None, tmp_path: Path, how: str, status: int, text: str) -> None:
    settings = {"AUTOPROF": "1", "AUTOPROF_STEPS": "", "AUTOPROF_RECIPES": str(SCRIPTS / "dying.toml")}
    command = [sys.executable, str(SCRIPTS / "dying.py"), how]
    ended = processes.run(command, cwd=tmp_path, env=clean_environment(**settings), timeout_s=300)
    assert ended.status == status, ended.output[-3000:]
    found = deaths.find_in_run(runs.find(tmp_path / "autoprof_runs", "latest"))
    assert (deaths.sentence(found[0]) if found else "") == text
    # The only consequence is the trainer's exception; actors that Ray ended with the driver are not listed.
    assert {death.how for death in found[1:]} <= {deaths.EXCEPTION}


@pytest.mark.fault("Ray kills an actor for memory", "ends as without autoprof", "nothing; doctor names actor and cause")
def test_the_actor_that_ray_killed_for_memory_is_named(thorough: None, tmp_path: Path) -> None:
    sizes = dict(line.split()[:2] for line in Path("/proc/meminfo").read_text().splitlines())
    total, free = int(sizes["MemTotal:"]), int(sizes["MemAvailable:"])
    # Ray's limit is a share of the machine's memory. Set it 1.5 GB above the current use; Ray itself needs half of it.
    threshold = (total - free + 1_500_000) / total
    settings = {
        "AUTOPROF": "1",
        "AUTOPROF_STEPS": "",
        "AUTOPROF_RECIPES": str(SCRIPTS / "dying.toml"),
        "RAY_memory_usage_threshold": f"{threshold:.4f}",
        "RAY_memory_monitor_refresh_ms": "100",
    }
    command = [sys.executable, str(SCRIPTS / "dying.py"), "memory"]
    ended = processes.run(command, cwd=tmp_path, env=clean_environment(**settings), timeout_s=300)
    assert ended.status == 1, ended.output[-3000:]
    found = deaths.find_in_run(runs.find(tmp_path / "autoprof_runs", "latest"))
    assert re.fullmatch(
        rf"actor rank 0 was killed by Ray \(out of memory: [0-9.]+ GB of [0-9.]+ GB used\) {IN_UPDATE}",
        deaths.sentence(found[0]),
    )
