"""An actor that dies in a window and that Ray starts anew, with its task tried again."""

from __future__ import annotations

import sys
from pathlib import Path

import processes
import pytest
from helpers import clean_environment
from small_trainer import metas, prepare

from autoprof import listing

SCRIPT = """
import os, ray
ray.init(num_cpus=1, include_dashboard=False)

@ray.remote(max_restarts=1, max_task_retries=1)
class Worker:
    def train(self, marker):
        from small import Trainer
        def inside():
            if not os.path.exists(marker):
                open(marker, "w").close()
                os._exit(1)
        Trainer().fit(inside)
        return os.getpid()

print("PID", ray.get(Worker.remote().train.remote(os.path.abspath("died"))))
ray.shutdown()
"""


@pytest.mark.fault("a Ray actor is started anew, a task retried", "go on", "the dead one's capture")
def test_an_actor_that_is_started_anew_overwrites_nothing(tmp_path: Path) -> None:
    prepare(tmp_path, lambda *_, **__: None)  # type: ignore[arg-type,return-value]
    (tmp_path / "drive.py").write_text(SCRIPT)
    lib = tmp_path / "lib"
    environment = clean_environment(
        AUTOPROF="1",
        AUTOPROF_STEPS="2",
        AUTOPROF_RECIPES=str(lib / "small.toml"),
        PYTHONPATH=str(lib),
        OMP_NUM_THREADS="1",
        RAY_USAGE_STATS_ENABLED="0",
        RAY_AUTH_MODE="disabled",
    )
    done = processes.run([sys.executable, "drive.py"], cwd=tmp_path, env=environment, timeout_s=150)
    assert done.status == 0, done.output[-3000:]
    (run,) = listing.runs(tmp_path / "autoprof_runs")
    assert run.state == "ended"
    states = {capture.name.rpartition(".pid")[2]: capture.state for capture in run.captures}
    (second,) = [line.split()[1] for line in done.output.splitlines() if line.startswith("PID ")]
    assert sorted(states.values()) == ["complete", "unfinished"]
    assert states[second] == "complete"
    assert [str(meta["pid"]) for meta in metas(tmp_path)] == [second]
    # Neither took the other's name.
    assert all(".2." not in capture.name for capture in run.captures)
