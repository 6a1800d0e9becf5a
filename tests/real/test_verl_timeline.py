"""Timeline of real runs of verl: steps, timers, samples with their turns and rewards, requests of each replica."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.verl_runs import VerlRun

# Timers of a step of V1's synchronous trainer, in the order of their ends.
TIMERS = ["gen", "old_log_prob", "ref", "adv", "update_actor", "update_weights"]
PROMPTS = 4
Spans = list[dict[str, Any]]


def of(run: VerlRun, kind: str, step: int | None = None, **ids: Any) -> Spans:
    """Return the spans of a kind and a step, in the order of their begin; of validations only with `validate=True`."""
    wanted = {"validate": None} | ids
    found = [span for span in run.spans if span["kind"] == kind and step in (None, span["step"])]
    found = [span for span in found if all(span.get("ids", {}).get(name) == value for name, value in wanted.items())]
    return sorted(found, key=lambda span: span["start_ns"])


def inside(inner: dict[str, Any], outer: dict[str, Any], slack_ns: int = 0) -> bool:
    return outer["start_ns"] - slack_ns <= inner["start_ns"] <= inner["end_ns"] <= outer["end_ns"] + slack_ns


def test_every_timeline_names_its_process(v1: VerlRun) -> None:
    for path in v1.directory.glob("timeline/*.jsonl"):
        process, *_ = v1.lines_of(path)
        assert process["kind"] == "process"
        assert f"{process['host']}-{process['pid']}" == path.stem


@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_the_drivers_timers_equal_those_that_verl_prints(v1: VerlRun, step: int) -> None:
    (whole,) = of(v1, "step", step)
    timers = sorted(of(v1, "timer", step), key=lambda span: span["end_ns"])
    extra = {2: ["testing"], 4: ["testing", "save_checkpoint"]}.get(step, [])
    assert sorted(span["name"] for span in timers) == sorted([*TIMERS, "step", *extra])
    assert [span["name"] for span in timers if span["name"] in TIMERS] == TIMERS
    (around,) = [span for span in timers if span["name"] == "step"]
    printed = v1.timed(step)
    for span in timers:
        assert (span["role"], span["step"]) == ("trainer", step)
        assert span is around or inside(span, whole)
        assert span["name"] == "testing" or inside(span, around)
        if span["name"] in TIMERS:
            # Both timers measure the same call; verl prints three digits.
            seconds = (span["end_ns"] - span["start_ns"]) / 1e9
            assert seconds == pytest.approx(printed[span["name"]], rel=0.05, abs=0.05)


@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_every_sample_has_its_turn_and_its_reward(v1: VerlRun, step: int) -> None:
    (whole,) = of(v1, "step", step)
    samples = of(v1, "sample", step)
    assert len({span["ids"]["sample"] for span in samples}) == len(samples) == PROMPTS
    for sample in samples:
        ids = sample["ids"]
        assert (ids["rollout"], ids["agent"]) == (0, "single_turn_agent")
        assert inside(sample, whole)
        assert sample["role"] == "agent_loop"
        (turn,) = of(v1, "turn", step, sample=ids["sample"])
        (reward,) = of(v1, "reward", step, sample=ids["sample"])
        assert inside(turn, sample)
        assert inside(reward, sample)
        assert turn["end_ns"] <= reward["start_ns"]
        assert 0 < turn["counts"]["prompt_tokens"] <= 64
        assert 0 < turn["counts"]["response_tokens"] <= 32
        assert turn["ids"].items() >= ids.items()
        assert turn["ids"]["request"]


def test_samples_of_a_validation_are_marked(v1: VerlRun) -> None:
    for step in (2, 4):
        (testing,) = [span for span in of(v1, "timer", step) if span["name"] == "testing"]
        samples = of(v1, "sample", step, validate=True)
        assert len(samples) >= PROMPTS
        assert all(inside(sample, testing) for sample in samples)
    assert not of(v1, "sample", 3, validate=True)


@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_the_servers_requests_are_within_the_turns(v1: VerlRun, step: int) -> None:
    turns = of(v1, "turn", step)
    for request in of(v1, "request"):
        around = [turn for turn in turns if inside(request, turn)]
        if around:
            assert request["ids"]["replica"] == 0
            assert request["role"] == "rollout"
            tokens = [(turn["counts"]["prompt_tokens"], turn["counts"]["response_tokens"]) for turn in around]
            assert (request["counts"]["prompt_tokens"], request["counts"]["response_tokens"]) in tokens
    assert len([request for request in of(v1, "request") if any(inside(request, turn) for turn in turns)]) == PROMPTS


def test_an_engines_window_is_within_its_step(v1: VerlRun) -> None:
    assert [span["step"] for span in of(v1, "window")] == [2, 4]
    for window in of(v1, "window"):
        assert window["ids"] == {"replica": 0}
        begin, end = v1.step_window(window["step"])
        assert begin <= window["start_ns"] < window["end_ns"] <= end
        # The window covers the first prompt.
        assert all(inside(turn, window) for turn in of(v1, "turn", window["step"])[:1])


@pytest.mark.parametrize("step", [2, 5])
def test_each_answer_is_a_sample_and_both_replicas_have_requests(continuous: VerlRun, step: int) -> None:
    (whole,) = of(continuous, "step", step)
    samples = of(continuous, "sample", step)
    pairs = [(span["ids"]["sample"], span["ids"]["rollout"]) for span in samples]
    prompts = {sample for sample, _ in pairs}
    assert len(prompts) == 2
    assert sorted(pairs) == sorted((sample, rollout) for sample in prompts for rollout in (0, 1))
    requests = [span for span in of(continuous, "request") if inside(span, whole)]
    assert len(requests) == 4
    assert {span["ids"]["replica"] for span in requests} == {0, 1}
    assert len(of(continuous, "turn", step)) == len(of(continuous, "reward", step)) == 4


def test_no_text_of_prompts_or_answers_is_on_the_timeline(v1: VerlRun) -> None:
    allowed = {"sample", "rollout", "agent", "validate", "request", "replica"}
    for span in v1.spans:
        assert set(span.get("ids", {})) <= allowed
        assert all(len(str(value)) <= 40 for value in span.get("ids", {}).values())
