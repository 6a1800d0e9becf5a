"""The report of real runs of verl: its figures are verl's own, and what holds a step up is found."""

from __future__ import annotations

import pytest
from verl_runs import VerlRun

from autoprof import listing
from autoprof.report import build

pytestmark = pytest.mark.real


def test_the_seconds_of_stages_are_those_that_verl_logs(v1: VerlRun) -> None:
    figures = build.figures(listing.read(v1.directory))
    assert [row.number for row in figures.steps] == [1, 2, 3, 4]
    for row in figures.steps:
        timed = v1.timed(row.number)
        for stage in ("gen", "old_log_prob", "ref", "adv", "update_actor", "update_weights"):
            assert row.stages[stage] == pytest.approx(timed[stage], abs=0.02), stage
        assert sum(row.stages.values()) == pytest.approx(row.seconds)
        assert row.samples == 4
        assert row.tokens_per_s
    step = next(step for step in figures.details if step.number == 2)
    labels = [lane.label for lane in step.lanes]
    assert labels == ["trainer", "actor rank 0", "ref rank 0", "agent_loop", "rollout replica 0"]
    assert step.samples is not None
    assert step.samples.count == 4
    for sample in step.samples.longest:
        assert [span.kind for span in sample.spans] == ["turn", "reward"]
        assert sum(part.seconds for part in sample.parts) == pytest.approx(sample.seconds)
    assert step.path[0].stage == "gen"
    captured = {(capture.role, capture.stage) for capture in step.captures}
    assert {("actor", "update_actor"), ("ref", "compute_ref_log_prob"), ("rollout", "rollout")} <= captured
    assert all(capture.state == "complete" for capture in step.captures)
    engine = next(capture.engine for capture in step.captures if capture.engine)
    assert engine.engine == "vllm"
    assert engine.decode.passes > engine.prefill.passes > 0


def test_a_slow_reward_is_found(slowed: VerlRun) -> None:
    found = build.figures(listing.read(slowed.directory)).findings
    slow = next(finding for finding in found if finding.kind == "slow_reward")
    assert slow.step == 10
    assert "for 1 of 16 samples: the reward took 15." in slow.text
    assert slow.seconds == pytest.approx(15, abs=1)
