"""Conditions and requests if torchrun has started several trainers: one decides, and all capture the same steps."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.helpers import TORCH
from tests.support.small_trainer import metas, torchrun

# The ranks wait for each other in each step, as collectives do. Rank 1 runs out of memory in step 2, and continues. A
# thread of rank 0 reads this in `told`, and sends a request. Steps 4 and 5 wait for both, and the step after a captured
# one waits for the traces. None of these steps is judged, so a busy machine changes nothing.
TRAINER = f"""{TORCH}
import os, statistics, time
import torch.distributed as dist
from pathlib import Path

class Trainer:
    def fit(self):
        dist.init_process_group("gloo")
        took = []
        for self.global_step in range(1, 21):
            began = time.monotonic()
            self.pause = 25 * statistics.median(took) if self.global_step == 16 else 0.2
            self.step()
            took.append(time.monotonic() - began)
        dist.destroy_process_group()
    def step(self):
        try:
            self.update()
        except torch.OutOfMemoryError:
            pass
    def update(self):
        dist.barrier()
        time.sleep(self.pause)
        run, deadline = Path("autoprof_runs/latest"), time.monotonic() + 60
        captured = run / f"global_step_{{self.global_step - 1:06d}}"
        while time.monotonic() < deadline and (
            (self.global_step == 4 and not list((run / "told").glob("*.1.json")) and "AUTOPROF_WHEN" in os.environ)
            or (self.global_step == 5 and not [*(run / "control").glob("*.json"), *(run / "control").glob("*.taken")])
            or (captured.exists() and len(list(captured.glob("*.meta.json"))) < 2)
        ):
            time.sleep(0.01)
        if self.global_step == 2 and dist.get_rank() == 1:
            raise torch.OutOfMemoryError("made up")
"""


def test_all_ranks_capture_the_steps_that_rank_0_decides_on(tmp_path: Path) -> None:
    script = "import small; small.Trainer().fit()"
    torchrun(tmp_path, script, trainer=TRAINER, AUTOPROF_STEPS="", AUTOPROF_WHEN="step>15x, oom")
    found = [(meta["step"], meta["rank"], meta["state"], meta["window"]) for meta in metas(tmp_path)]
    (first, _, _, ran_out), _, (second, _, _, slow), _ = found
    assert found == [
        (step, rank, "complete", why) for step, why in ((first, ran_out), (second, slow)) for rank in (0, 1)
    ]
    assert 4 <= first <= 7
    assert ran_out == "actor rank 1 ran out of memory in update_actor of step 2 (oom)"
    assert second == 18
    assert re.fullmatch(r"step 16 took .+ s, [\d.]+ times the median of [\d.]+ m?s \(step>15x\)", slow)


# Rank 1 sends a request during step 3, before rank 0 can begin step 4.
ASKS = TRAINER.replace("range(1, 21)", "range(1, 8)").replace(
    "        dist.barrier()",
    """        if self.global_step == 3 and dist.get_rank() == 1:
            subprocess.run([sys.executable, "-m", "autoprof", "trigger", "--steps", "2"], check=True)
        dist.barrier()""",
)


def test_all_ranks_capture_the_steps_of_a_request(tmp_path: Path) -> None:
    script = "import small; small.Trainer().fit()"
    torchrun(tmp_path, script, trainer=f"import subprocess, sys\n{ASKS}", AUTOPROF_STEPS="")
    assert [(meta["step"], meta["rank"], meta["state"], meta["window"]) for meta in metas(tmp_path)] == [
        (step, rank, "complete", "autoprof trigger") for step in (5, 6) for rank in (0, 1)
    ]
