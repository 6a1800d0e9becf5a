"""Asynchronous trainers of verl 0.9.1: answers can take longer than a step, and engines can have their own devices."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.support.verl_runs import VerlRun, metas, operators, window

# Number of times that each stage of a step runs. The fully asynchronous trainer uses the log probs of the rollout.
UPDATES = {
    "actor.compute_log_prob": 1,
    "actor.update_actor": 1,
    "actor.update_weights": 1,
    "ref.compute_ref_log_prob": 1,
    "trainer.compute_advantage": 1,
    "rollout.rollout": 2,
}
TWICE = {name: 1 if name == "actor.update_weights" else 2 for name in UPDATES}
EXPECTED = {
    "colocate_async": UPDATES,
    "separate_async": TWICE,
    "fully_async": {name: count for name, count in TWICE.items() if name != "actor.compute_log_prob"},
}
STEPS = [2, 4]
# Replica that generates. The first replica of `separate_async` is on the trainer's device and generates nothing.
REPLICA = {"colocate_async": 0, "separate_async": 1, "fully_async": 0}


@pytest.fixture(params=list(EXPECTED))
def trainer(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def asynchronous(trainer: str, request: pytest.FixtureRequest) -> VerlRun:
    return request.getfixturevalue(trainer)


def stages(run: VerlRun, step: int) -> list[dict[str, Any]]:
    """Return the spans of the stages on the trainer's devices, in order."""
    found = run.of("stage", step)
    return sorted((span for span in found if span["role"] in ("actor", "ref")), key=lambda span: span["start_ns"])


def test_steps_are_the_trainers_own(asynchronous: VerlRun, trainer: str) -> None:
    # The fully asynchronous trainer begins a fifth version, for which no samples come.
    expected = [1, 2, 3, 4, 5] if trainer == "fully_async" else [1, 2, 3, 4]
    assert [span["step"] for span in asynchronous.of("step")] == expected
    folders = sorted(path.name for path in asynchronous.directory.glob("global_step_*"))
    assert folders == ["global_step_000002", "global_step_000004"]


@pytest.mark.parametrize("step", STEPS)
def test_every_stage_and_both_parts_of_the_engine_are_captured(asynchronous: VerlRun, trainer: str, step: int) -> None:
    found = metas(asynchronous, step)
    assert Counter(f"{meta['role']}.{meta['stage']}" for meta in found) == EXPECTED[trainer]
    assert {(meta["state"], meta["reason"], meta["step"]) for meta in found} == {("complete", "", step)}
    assert {meta["replica"] for meta in found if meta["role"] == "rollout"} == {REPLICA[trainer]}


@pytest.mark.parametrize("step", STEPS)
def test_every_trace_is_within_its_step(asynchronous: VerlRun, step: int) -> None:
    begin, end = asynchronous.step_window(step)
    for path in asynchronous.step_folder(step).glob("*.pt.trace.json.gz"):
        first, last = window(asynchronous.trace(step, path.name.removesuffix(".pt.trace.json.gz")))
        assert begin <= first < last <= end, path.name


@pytest.mark.parametrize("step", STEPS)
def test_the_engines_worker_records_forward_passes(asynchronous: VerlRun, trainer: str, step: int) -> None:
    names = [event["name"] for event in operators(asynchronous.trace(step, f"rollout.replica{REPLICA[trainer]}.rank0"))]
    assert [name for name in names if name.startswith("execute_")]


@pytest.mark.parametrize("step", STEPS)
def test_an_engine_on_the_trainers_devices_stops_before_the_first_stage(colocate_async: VerlRun, step: int) -> None:
    (rollout,) = [meta for meta in metas(colocate_async, step) if meta["part"] == "rank0"]
    assert rollout["clock"]["stop"]["unix_ns"] < stages(colocate_async, step)[0]["start_ns"]


@pytest.mark.parametrize("name", ["separate_async", "fully_async"])
def test_an_engine_with_its_own_devices_is_not_stopped_for_the_trainer(
    name: str, request: pytest.FixtureRequest
) -> None:
    run: VerlRun = request.getfixturevalue(name)
    for step in STEPS:
        parts = [meta["clock"] for meta in metas(run, step) if meta["role"] == "rollout"]
        assert len(parts) == 2
        for clock in parts:
            assert clock["start"]["unix_ns"] < stages(run, step)[0]["start_ns"]
            assert clock["stop"]["unix_ns"] > stages(run, step)[-1]["end_ns"]


def test_the_fully_asynchronous_step_is_a_version_of_the_weights(fully_async: VerlRun) -> None:
    for step in (1, 2, 3, 4):
        names = [span["name"] for span in stages(fully_async, step)]
        assert names.count("update_actor") == 2
        assert names[-1] == "update_weights"


def test_no_hook_failed_and_no_files_or_processes_remain(asynchronous: VerlRun) -> None:
    asynchronous.assert_sound()


@pytest.mark.parametrize("name", ["separate_async", "fully_async"])
def test_the_traces_of_both_updates_have_a_backward_pass(name: str, request: pytest.FixtureRequest) -> None:
    run: VerlRun = request.getfixturevalue(name)
    for beginning in ("actor.update_actor.rank0", "actor.update_actor.2.rank0"):
        names = {event["name"] for event in operators(run.trace(2, beginning))}
        assert any(name.startswith("autograd::engine::evaluate_function") for name in names)
