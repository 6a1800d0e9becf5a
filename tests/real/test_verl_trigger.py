"""`autoprof trigger --wait` from a second shell, between the windows of a real run of verl."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.support.verl_runs import VerlRun

STAGES = {
    "actor.compute_log_prob",
    "actor.update_actor",
    "actor.update_weights",
    "critic.compute_values",
    "critic.update_critic",
    "ref.compute_ref_log_prob",
    "trainer.compute_advantage",
}
# Steps of the trigger that waits, and all captured steps; earlier steps have other windows.
WAITED, CAPTURED = (7, 8), range(2, 9)


def test_both_steps_have_captures_of_all_roles(critic: VerlRun) -> None:
    folders = sorted(path.name for path in critic.directory.glob("global_step_*"))
    assert folders == [f"global_step_{step:06d}" for step in CAPTURED]
    for step in WAITED:
        found = [json.loads(path.read_text()) for path in critic.step_folder(step).glob("*.meta.json")]
        assert {(meta["state"], meta["window"]) for meta in found} == {("complete", "autoprof trigger")}
        names = [path.name for path in critic.step_folder(step).glob("*.pt.trace.json.gz")]
        kinds = sorted(re.sub(r"(\.rank0|(?<=\.frontend))\..*", "", name) for name in names)
        assert kinds == sorted([*STAGES, "rollout.replica0", "rollout.replica0.frontend"])


def test_the_waiting_trigger_prints_progress_and_the_paths_of_traces(critic: VerlRun) -> None:
    lines = (critic.folder / "trigger.txt").read_text().splitlines()
    first, second = WAITED
    # The other triggers did not wait.
    *others, waiting = [number for number, line in enumerate(lines) if line.startswith("asked run ")]
    assert len(others) == 4
    assert lines[waiting].startswith(f"asked run {critic.directory.name} for 2 steps from 7 on, in ")
    # Other lines about steps are left out: the command polls, and may miss a state.
    steps = [line for line in lines[waiting:] if line.startswith("step ")]
    assert [line for line in steps if "is captured" in line] == [
        f"step {first} is captured (1 of 2)",
        f"step {second} is captured (2 of 2)",
    ]
    assert lines[-4].startswith("captures: 18, ")
    assert lines[-3:] == [*(str(critic.step_folder(step)) for step in WAITED), "status 0"]


def test_all_steps_are_on_the_timeline_and_all_requests_are_taken(critic: VerlRun) -> None:
    assert [span["step"] for span in critic.spans if span["kind"] == "step"] == list(range(1, 10))
    assert [path for path in Path(critic.directory, "control").iterdir() if not path.name.endswith(".taken")] == []
