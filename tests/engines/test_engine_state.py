"""State of a real engine with more requests than it runs at a time, as its scheduler's process reports it."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.support import engines, processes
from tests.support.helpers import clean_environment

HERE = Path(__file__).parent
AT_A_TIME, REQUESTS = 4, 100


@pytest.mark.parametrize("release", engines.NAMES)
def test_the_scheduler_reports_its_requests_and_its_blocks(release: str, tmp_path: Path) -> None:
    python, name = engines.python_of(release), release.partition("-")[0]
    if name not in ("vllm", "sglang"):
        pytest.skip(f"{name} is not an engine")
    environment = clean_environment(
        OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TORCHDYNAMO_DISABLE="1", VLLM_CPU_OMP_THREADS_BIND="nobind"
    )
    if name == "sglang":
        environment |= {
            "PYTHONPATH": str(HERE / "sglang_cpu"),
            "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_CPU_OMP_THREADS_BIND": f"{min(1, (os.cpu_count() or 1) - 1)}",
        }
    model = str(tmp_path / "model")
    made = processes.run(
        [python, str(HERE / "sglang_scripts" / "model.py"), model], cwd=tmp_path, env=environment, timeout_s=120
    )
    assert made.status == 0, made.output[-4000:]
    finished = processes.run(
        [python, str(HERE / "state_scripts" / "busy.py"), name, model],
        cwd=tmp_path,
        env=environment | {"AUTOPROF": "1", "AUTOPROF_STEPS": ""},
        timeout_s=600,
    )
    assert finished.status == 0, finished.output[-4000:]
    (line,) = re.findall(r"^RESULT (.*)$", finished.output, re.MULTILINE)
    answers = json.loads(line)
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
