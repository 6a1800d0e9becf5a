"""`autoprof stacks` on a real run of verl while it trains: all of its processes answer, and it trains on unchanged."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.verl_runs import VerlRun


@pytest.fixture(scope="module")
def said(stood: VerlRun) -> dict[str, Any]:
    """What was printed first."""
    text = (stood.folder / "trigger.txt").read_text()
    found: dict[str, Any] = json.loads(text.partition("\nstatus 0\n")[0])
    return found


def titles(said: dict[str, Any], by: str) -> set[str]:
    return {each["process"].partition(".")[0].partition(" ")[0] for each in said["processes"] if each["by"] == by}


def test_all_processes_of_the_run_answer_by_themselves(said: dict[str, Any]) -> None:
    actors = {"TaskRunnerV1", "WorkerDict", "AgentLoopWorkerTQ", "vLLMHttpServer"}
    assert {f"ray::{name}" for name in actors} | {"VLLM::Worker"} <= titles(said, "itself")
    # None of its hooks was called before the first window.
    assert titles(said, "py-spy") <= {"EngineCore"}
    assert (said["absent"], said["problems"]) == ([], [])


def test_open_spans_belong_to_a_thread_or_a_task(said: dict[str, Any]) -> None:
    kinds = set()
    for each in said["processes"]:
        owned = {place for stack in [*each["threads"], *each.get("tasks", [])] for place in stack.get("spans", [])}
        kinds |= {each["spans"][place]["kind"] for place in owned}
        lost = [span["kind"] for place, span in enumerate(each.get("spans", [])) if place not in owned]
        # Timers are known by no frame; and something may end or begin while it is looked at.
        assert len(lost) - lost.count("timer") <= 2, lost
    assert "step" in kinds


def test_the_trainer_stands_in_its_step(said: dict[str, Any]) -> None:
    (trainer,) = [each for each in said["processes"] if each["process"].startswith("ray::TaskRunnerV1")]
    frames = [frame for thread in trainer["threads"] for frame in thread["frames"]]
    assert any("/verl/trainer/" in frame["file"] and frame["function"].endswith("fit") for frame in frames)
    assert not any("/autoprof/hooks/" in frame["file"] for frame in frames)


def test_the_engine_says_what_its_requests_wait_on(said: dict[str, Any]) -> None:
    tasks = [task for each in said["processes"] for task in each.get("tasks", [])]
    assert len(tasks) > 3
    assert "Future" in {task.get("waits_on") for task in tasks}


def test_native_functions_are_told(stood: VerlRun) -> None:
    rest = (stood.folder / "trigger.txt").read_text().partition("\nstatus 0\n")[2]
    assert ".so" in rest
    assert rest.endswith("status 0\n")


def test_it_trains_on_as_without_autoprof(stood: VerlRun, v1_off: VerlRun) -> None:
    assert sorted(stood.metrics) == list(range(1, 15))
    assert {step: stood.metrics[step] for step in range(1, 6)} == {step: v1_off.metrics[step] for step in range(1, 6)}
    assert all(process["errors"] == {} for process in stood.processes)
