"""Two ranks, one of which does not join a collective: both write their stacks, and torch names the missing rank."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from autoprof.rundir import layout
from autoprof.rundir.records import ProcessStacks, Why
from tests.support.helpers import TORCH
from tests.support.small_trainer import torchrun

# Rank 1 joins the second all_reduce of step 5 late, after both ranks have written their stacks, or never.
TRAINER = f"""{TORCH}
import os
import time
import torch.distributed as dist
from pathlib import Path

class Trainer:
    def fit(self):
        dist.init_process_group("gloo")
        # Rank 0 has a number instead.
        dist.new_group([1])
        for self.global_step in range(1, 6):
            self.step()
        dist.destroy_process_group()
    def step(self):
        self.update()
    def update(self):
        ones = torch.ones(4)
        dist.all_reduce(ones)
        if self.global_step == 5 and dist.get_rank() == 1:
            self.fetch_score()
        dist.all_reduce(ones)
    def fetch_score(self):
        hangs = Path("autoprof_runs/latest/hangs/step_000005")
        deadline = time.monotonic() + 100
        while time.monotonic() < deadline and len(list(hangs.glob("*-[0-9]*.json"))) < 2:
            time.sleep(0.1)
"""


def test_both_ranks_say_where_they_stand_and_torch_says_who_is_missing(tmp_path: Path) -> None:
    script = "import small; small.Trainer().fit()"
    run = torchrun(
        tmp_path, script, trainer=TRAINER, AUTOPROF_STEPS="", AUTOPROF_WHEN="hang>1s", AUTOPROF_LOOK_MS="200"
    )
    (folder,) = sorted((Path(run.path) / "hangs").iterdir())
    assert folder.name == "step_000005"
    why = layout.read_json(folder / "why.json", Why)
    assert (why.step, why.condition) == (5, "hang>1s")
    assert re.fullmatch(r"step 5 has taken .* s, [\d.]+ times the median of .*", why.reason)
    told = {
        each.rank: each
        for each in (layout.read_json(path, ProcessStacks) for path in sorted(folder.glob("*-[0-9]*.json")))
    }
    assert sorted(told) == [0, 1]  # type: ignore[type-var]
    for each in told.values():
        assert each.memory["resident"] > 1 << 20
        assert {"step", "update_actor"} == {span.name for span in each.spans}
    places = {
        rank: [frame.function.rpartition(".")[2] for frame in each.threads[0].frames] for rank, each in told.items()
    }
    assert places[0][-1] == "all_reduce"
    assert "fetch_score" in places[1]
    # Result of torch's analyser: the last collective has one of its two ranks.
    command = ["-m", "torch.distributed.flight_recorder.fr_trace", str(folder), "--prefix", "rank_"]
    analysed = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=100, check=False)
    text = analysed.stdout + analysed.stderr
    assert "Not all ranks joining collective, sequence number: 10" in text
    assert "collective: gloo:all_reduce" in text
    assert "missing ranks: {1}" in text
    (line,) = [line for line in (tmp_path / "stderr").read_text().splitlines() if "autoprof doctor" in line]
    assert line.startswith("autoprof: step 5 has taken ")
    assert f"stacks are in {folder}" in line
    assert json.loads((Path(run.path) / "run.json").read_text())["state"] == "ended"
