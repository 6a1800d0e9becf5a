"""SFT trainers of verl 0.9.1, under torchrun and under Ray."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.verl_runs import VerlRun, metas, operators


def steps(run: VerlRun) -> dict[int, list[int]]:
    """Return the numbers of the steps in each process's timeline, by pid."""
    seen: dict[int, list[int]] = {}
    for path in sorted(run.directory.glob("journal/*.jsonl")):
        spans = [span for span in run.spans_of(path) if span["kind"] == "step"]
        if spans:
            seen[int(path.stem.rpartition("-")[2])] = [span["step"] for span in spans]
    return seen


def captures(run: VerlRun, step: int) -> list[tuple[Any, ...]]:
    return [(meta["role"], meta["stage"], meta["rank"], meta["state"], meta["reason"]) for meta in metas(run, step)]


def test_every_rank_counts_the_trainers_steps_and_the_chosen_one_is_captured(sft: VerlRun) -> None:
    assert list(steps(sft).values()) == [[1, 2, 3], [1, 2, 3]]
    assert [path.name for path in sft.directory.glob("global_step_*")] == ["global_step_000002"]
    assert captures(sft, 2) == [("trainer", "train_batch", 1, "complete", "")]


def test_training_is_the_same_with_autoprof(sft: VerlRun, sft_off: VerlRun) -> None:
    assert sorted(sft.metrics) == sorted(sft_off.metrics) == [1, 2, 3]
    assert {"train/loss", "train/grad_norm"} <= sft.metrics[1].keys()
    assert sft.metrics == sft_off.metrics


def test_a_resumed_run_continues_the_step_numbers(sft_resumed: VerlRun) -> None:
    assert sorted(sft_resumed.metrics) == [4, 5]
    assert list(steps(sft_resumed).values()) == [[4, 5], [4, 5]]
    assert captures(sft_resumed, 5) == [("trainer", "train_batch", 0, "complete", "")]


def test_the_first_step_after_a_resume_is_captured_with_its_reason(sft_resumed: VerlRun) -> None:
    assert captures(sft_resumed, 4) == [("trainer", "train_batch", 0, "complete", "")]
    whys = {step: {meta["window"] for meta in metas(sft_resumed, step)} for step in (4, 5)}
    assert whys == {4: {"the run was resumed at step 4 (resume:1)"}, 5: {"AUTOPROF_STEPS=+2"}}


def test_under_ray_the_driver_counts_steps_and_the_worker_is_captured(sft_ray: VerlRun) -> None:
    assert list(steps(sft_ray).values()) == [[1, 2, 3, 4]]
    assert captures(sft_ray, 2) == [("trainer", "train_batch", 0, "complete", "")]
    (driver,) = steps(sft_ray)
    (worker,) = {meta["pid"] for meta in metas(sft_ray, 2)}
    assert worker != driver


@pytest.mark.parametrize("name", ["sft", "sft_ray"])
def test_the_trace_has_the_backward_pass_and_nothing_is_left_behind(name: str, request: pytest.FixtureRequest) -> None:
    run: VerlRun = request.getfixturevalue(name)
    names = {event["name"] for event in operators(run.trace(2, "trainer.train_batch"))}
    assert any(event.startswith("autograd::engine::evaluate_function") for event in names)
    run.assert_sound()
