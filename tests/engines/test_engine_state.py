"""State of a real engine with more requests than it runs at a time, as its scheduler's process reports it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support import engines

HERE = Path(__file__).parent
AT_A_TIME, REQUESTS = 4, 100


@pytest.mark.parametrize("release", engines.NAMES)
def test_the_scheduler_reports_its_requests_and_its_blocks(release: str, tmp_path: Path) -> None:
    name = release.partition("-")[0]
    if name not in ("vllm", "sglang"):
        pytest.skip(f"{name} is not an engine")
    engine = engines.Engine(release, tmp_path, cores=f"{min(1, (os.cpu_count() or 1) - 1)}")
    script = Path(__file__).parent / "state_scripts" / "busy.py"
    answers = engine.run(script, name, engine.model, timeout_s=600, AUTOPROF="1", AUTOPROF_STEPS="").result
    (scheduler,) = (each for each in answers if each.get("engine"))
    state = scheduler["engine"]
    assert 0 < state["running"] <= AT_A_TIME
    assert state["running"] + state["waiting"] <= REQUESTS
    assert state["waiting"] > 0
    assert 0 < state["free_blocks"] < state["total_blocks"]
    assert 0 < state["longest_s"] < 600
    assert state["longest"]
    assert "left_out" not in scheduler
    assert scheduler["memory"]["resident"] > 1 << 20
    if name == "vllm":
        # The worker runs in its own process; a single rank has no flight record.
        (worker,) = (each for each in answers if "Worker" in each["process"])
        assert worker["threads"][0]["frames"]
