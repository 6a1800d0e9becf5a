"""`autoprof trigger --wait` from a second shell, while a real run of verl goes on without a window."""

from __future__ import annotations

import json
import re
from pathlib import Path

from verl_runs import VerlRun

STAGES = {
    "actor.compute_log_prob",
    "actor.update_actor",
    "actor.update_weights",
    "ref.compute_ref_log_prob",
    "trainer.compute_advantage",
}


def test_two_step_folders_are_left_with_all_roles(asked: VerlRun) -> None:
    folders = sorted(path.name for path in asked.directory.glob("global_step_*"))
    first = int(folders[0].rpartition("_")[2])
    assert 4 <= first < 30
    assert folders == [f"global_step_{step:06d}" for step in (first, first + 1)]
    for step in (first, first + 1):
        found = [json.loads(path.read_text()) for path in asked.step_folder(step).glob("*.meta.json")]
        assert {(meta["state"], meta["window"]) for meta in found} == {("complete", "autoprof trigger")}
        names = [path.name for path in asked.step_folder(step).glob("*.pt.trace.json.gz")]
        kinds = sorted(re.sub(r"(\.rank0|(?<=\.frontend))\..*", "", name) for name in names)
        assert kinds == sorted([*STAGES, "rollout.replica0", "rollout.replica0.frontend"])


def test_who_waits_is_told_how_far_it_is_and_where_the_traces_are(asked: VerlRun) -> None:
    lines = (asked.folder / "trigger.txt").read_text().splitlines()
    folders = sorted(map(str, asked.directory.glob("global_step_*")))
    first, second = (int(folder.rpartition("_")[2]) for folder in folders)
    assert lines[0].startswith(f"asked run {asked.directory.name} for the next 2 steps, in ")
    # What is only looked at now and then may be missed.
    told = [line for line in lines if line.startswith("step ")]
    assert [line for line in told if "is captured" in line] == [
        f"step {first} is captured (1 of 2)",
        f"step {second} is captured (2 of 2)",
    ]
    assert lines[-4].startswith("captures: 14, ")
    assert lines[-3:] == [*folders, "status 0"]


def test_all_steps_are_on_the_timeline_and_nothing_was_captured_besides(asked: VerlRun) -> None:
    assert [span["step"] for span in asked.spans if span["kind"] == "step"] == list(range(1, 31))
    assert [path for path in Path(asked.directory, "control").iterdir() if not path.name.endswith(".taken")] == []
