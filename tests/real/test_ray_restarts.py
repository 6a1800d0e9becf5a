"""Restarts under Ray: of an actor that died during a window, of its task, and of Ray itself."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from autoprof.rundir import runs
from tests.support import processes
from tests.support.helpers import clean_environment
from tests.support.small_trainer import metas, write

DIES = """
import os, ray
ray.init(address="local", num_cpus=1, include_dashboard=False)

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


# Memory runs out only after Ray has been restarted. The driver learns of it in a thread, so the script waits.
AGAIN = """
import time, ray, torch
from small import Trainer

def runs_out():
    raise torch.OutOfMemoryError("made up")

ray.init(address="local", num_cpus=1, include_dashboard=False)
Trainer().fit(lambda: time.sleep(3))
ray.shutdown()
ray.init(address="local", num_cpus=1, include_dashboard=False)
try:
    Trainer().fit(runs_out)
except torch.OutOfMemoryError:
    time.sleep(12)
Trainer().fit()
ray.shutdown()
"""


def driven(folder: Path, script: str, **variables: str) -> tuple[runs.Run, str]:
    """Run a driver that can import the small trainer, and return its run and its output."""
    lib = write(folder)
    (folder / "drive.py").write_text(script)
    environment = clean_environment(
        AUTOPROF="1", AUTOPROF_RECIPES=str(lib / "small.toml"), PYTHONPATH=str(lib), OMP_NUM_THREADS="1", **variables
    )
    done = processes.run([sys.executable, "drive.py"], cwd=folder, env=environment, timeout_s=150)
    assert done.status == 0, done.output[-3000:]
    (run,) = runs.runs(folder / "autoprof_runs")
    assert run.state == "ended"
    return run, done.output


@pytest.mark.fault("a Ray actor is restarted, a task retried", "continues", "the capture of the dead actor")
def test_a_restarted_actor_overwrites_nothing(tmp_path: Path) -> None:
    run, output = driven(tmp_path, DIES, AUTOPROF_STEPS="2")
    states = {capture.name.rpartition(".pid")[2]: capture.state for capture in run.captures}
    (second,) = [line.split()[1] for line in output.splitlines() if line.startswith("PID ")]
    assert sorted(states.values()) == ["complete", "unfinished"]
    assert states[second] == "complete"
    assert [str(meta["pid"]) for meta in metas(tmp_path)] == [second]
    # The two processes used different names.
    assert all(".2." not in capture.name for capture in run.captures)


def test_conditions_work_after_ray_is_restarted(tmp_path: Path) -> None:
    driven(tmp_path, AGAIN, AUTOPROF_STEPS="", AUTOPROF_WHEN="oom, memory>0.001")
    # The next steps may begin before the driver learns of a condition, and a capture may have both reasons.
    last_loop = [meta["window"] for meta in metas(tmp_path) if meta.get("loop") == 3]
    assert "actor rank 0 ran out of memory in update_actor of step 2 (oom)" in "; ".join(last_loop)
    said = r"\S+ had [0-9.]+ % of its memory in use after step [12] \(memory>0.001\)"
    assert re.search(said, "; ".join(last_loop)), last_loop
