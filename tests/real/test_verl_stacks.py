"""`autoprof stacks` on a real run of verl: all processes answer, and the training stays the same."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.verl_runs import VerlRun


@pytest.fixture(scope="module")
def said(stood: VerlRun) -> dict[str, Any]:
    """Return the answer to the first command."""
    text = (stood.folder / "trigger.txt").read_text()
    return json.loads(text.partition("\nstatus 0\n")[0])


def titles(said: dict[str, Any], by: str) -> set[str]:
    return {each["process"].partition(".")[0].partition(" ")[0] for each in said["processes"] if each["by"] == by}


def test_all_processes_of_the_run_answer(said: dict[str, Any]) -> None:
    actors = {"TaskRunnerV1", "WorkerDict", "AgentLoopWorkerTQ", "vLLMHttpServer"}
    assert {f"ray::{name}" for name in actors} | {"VLLM::Worker"} <= titles(said, "itself")
    # No hook of the engine core is called before the first window.
    assert titles(said, "py-spy") <= {"EngineCore"}
    assert (said["absent"], said["problems"]) == ([], [])


def test_open_spans_belong_to_a_thread_or_a_task(said: dict[str, Any]) -> None:
    kinds = set()
    for each in said["processes"]:
        owned = {place for stack in [*each["threads"], *each.get("tasks", [])] for place in stack.get("spans", [])}
        kinds |= {each["spans"][place]["kind"] for place in owned}
        lost = [span["kind"] for place, span in enumerate(each.get("spans", [])) if place not in owned]
        # No frame belongs to a timer, and spans may begin or end during the snapshot.
        assert len(lost) - lost.count("timer") <= 2, lost
    assert "step" in kinds


def test_the_trainers_frames_are_in_its_step(said: dict[str, Any]) -> None:
    (trainer,) = [each for each in said["processes"] if each["process"].startswith("ray::TaskRunnerV1")]
    frames = [frame for thread in trainer["threads"] for frame in thread["frames"]]
    assert any("/verl/trainer/" in frame["file"] and frame["function"].endswith("fit") for frame in frames)
    assert not any("/autoprof/hooks/" in frame["file"] for frame in frames)


def test_the_engines_tasks_show_what_they_wait_on(said: dict[str, Any]) -> None:
    tasks = [task for each in said["processes"] for task in each.get("tasks", [])]
    assert len(tasks) > 3
    assert "Future" in {task.get("waits_on") for task in tasks}


def test_native_frames_are_printed(stood: VerlRun) -> None:
    rest = (stood.folder / "trigger.txt").read_text().partition("\nstatus 0\n")[2]
    assert ".so" in rest
    assert rest.endswith("status 0\n")


def test_training_is_the_same_as_without_autoprof(stood: VerlRun, v1_off: VerlRun) -> None:
    assert sorted(stood.metrics) == list(range(1, 15))
    assert {step: stood.metrics[step] for step in range(1, 6)} == {step: v1_off.metrics[step] for step in range(1, 6)}
    assert all(process["errors"] == {} for process in stood.processes)
