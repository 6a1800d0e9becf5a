"""Timeline of a real run of verl: steps, timers, samples with their turns and rewards, requests; and its report."""

from __future__ import annotations

import pytest

from autoprof.report import build
from autoprof.report.model import OTHER
from autoprof.rundir import runs
from tests.support import truth
from tests.support.verl_runs import VerlRun, inside

# Timers of a step of V1's synchronous trainer, in the order of their ends.
TIMERS = ["gen", "old_log_prob", "ref", "adv", "update_actor", "update_weights"]
PROMPTS = 4


def test_every_timeline_names_its_process(v1: VerlRun) -> None:
    for path in v1.directory.glob("journal/*.jsonl"):
        process, *_ = v1.lines_of(path)
        assert process["kind"] == "process"
        assert f"{process['host']}-{process['pid']}" == path.stem


@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_the_drivers_timers_equal_those_that_verl_prints(v1: VerlRun, step: int) -> None:
    (whole,) = v1.of("step", step)
    timers = sorted(v1.of("timer", step), key=lambda span: span["end_ns"])
    extra = {2: ["testing"], 4: ["testing", "save_checkpoint"]}.get(step, [])
    assert sorted(span["name"] for span in timers) == sorted([*TIMERS, "step", *extra])
    assert [span["name"] for span in timers if span["name"] in TIMERS] == TIMERS
    (around,) = [span for span in timers if span["name"] == "step"]
    for span in timers:
        assert (span["role"], span["step"]) == ("trainer", step)
        assert span is around or inside(span, whole)
        assert span["name"] == "testing" or inside(span, around)
    # Both timers measure the same call; verl prints three digits. A busy machine may stop the process between the two,
    # but not at each timer.
    printed, took = v1.timed(step), {span["name"]: (span["end_ns"] - span["start_ns"]) / 1e9 for span in timers}
    differences = sorted(abs(took[name] - printed[name]) / max(1, printed[name]) for name in TIMERS)
    assert differences[-2] < 0.05
    assert differences[-1] < 0.25


@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_every_sample_has_its_turn_and_its_reward(v1: VerlRun, step: int) -> None:
    (whole,) = v1.of("step", step)
    samples = v1.of("sample", step)
    assert len({span["ids"]["sample"] for span in samples}) == len(samples) == PROMPTS
    for sample in samples:
        ids = sample["ids"]
        assert (ids["rollout"], ids["agent"]) == (0, "single_turn_agent")
        assert inside(sample, whole)
        assert sample["role"] == "agent_loop"
        (turn,) = v1.of("turn", step, sample=ids["sample"])
        (reward,) = v1.of("reward", step, sample=ids["sample"])
        assert inside(turn, sample)
        assert inside(reward, sample)
        assert turn["end_ns"] <= reward["start_ns"]
        assert 0 < turn["counts"]["prompt_tokens"] <= 64
        assert 0 < turn["counts"]["response_tokens"] <= 32
        assert turn["ids"].items() >= ids.items()
        assert turn["ids"]["request"]


def test_samples_of_a_validation_are_marked(v1: VerlRun) -> None:
    for step in (2, 4):
        (testing,) = [span for span in v1.of("timer", step) if span["name"] == "testing"]
        samples = v1.of("sample", step, validate=True)
        assert len(samples) >= PROMPTS
        assert all(inside(sample, testing) for sample in samples)
    assert not v1.of("sample", 3, validate=True)


@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_the_servers_requests_are_within_the_turns(v1: VerlRun, step: int) -> None:
    turns = v1.of("turn", step)
    for request in v1.of("request"):
        around = [turn for turn in turns if inside(request, turn)]
        if around:
            assert request["ids"]["replica"] == 0
            assert request["role"] == "rollout"
            tokens = [(turn["counts"]["prompt_tokens"], turn["counts"]["response_tokens"]) for turn in around]
            assert (request["counts"]["prompt_tokens"], request["counts"]["response_tokens"]) in tokens
    assert len([request for request in v1.of("request") if any(inside(request, turn) for turn in turns)]) == PROMPTS


def test_an_engines_window_is_within_its_step(v1: VerlRun) -> None:
    assert [span["step"] for span in v1.of("window")] == [2, 4]
    for window in v1.of("window"):
        assert window["ids"] == {"replica": 0}
        begin, end = v1.step_window(window["step"])
        assert begin <= window["start_ns"] < window["end_ns"] <= end
        # The window covers the first prompt.
        assert all(inside(turn, window) for turn in v1.of("turn", window["step"])[:1])


def test_no_text_of_prompts_or_answers_is_on_the_timeline(v1: VerlRun) -> None:
    allowed = {"sample", "rollout", "agent", "validate", "request", "replica", "trainer", "loop", "before_s"}
    for span in v1.spans:
        assert set(span.get("ids", {})) <= allowed
        assert all(len(str(value)) <= 40 for value in span.get("ids", {}).values())


@pytest.mark.truth
@pytest.mark.parametrize("name", ["v1", "v1_resumed", "legacy"])
def test_stages_and_tokens_equal_those_that_verl_logs(
    name: str, request: pytest.FixtureRequest, record_property: truth.Record
) -> None:
    run: VerlRun = request.getfixturevalue(name)
    report = truth.figures(run.directory)
    truth.row(record_property, f"verl {name}", "verl's timers and tokens", truth.verl_differences(run, report))


@pytest.mark.truth
@pytest.mark.parametrize("name", ["v1", "v1_resumed", "legacy"])
def test_a_healthy_run_has_no_finding(name: str, request: pytest.FixtureRequest, record_property: truth.Record) -> None:
    run: VerlRun = request.getfixturevalue(name)
    truth.row(record_property, f"verl {name}", "no finding", truth.unconfirmed(truth.figures(run.directory)))


def test_the_figures_of_a_step_are_complete(v1: VerlRun) -> None:
    figures = build.figures(runs.read(v1.directory))
    assert [row.number for row in figures.steps] == [1, 2, 3, 4]
    for row in figures.steps:
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
    # The driver may work for a moment before its first stage.
    assert next(part.stage for part in step.path if part.stage != OTHER) == "gen"
    captured = {(capture.role, capture.stage) for capture in step.captures}
    assert {("actor", "update_actor"), ("ref", "compute_ref_log_prob"), ("rollout", "rollout")} <= captured
    assert all(capture.state == "complete" for capture in step.captures)
    engine = next(capture.engine for capture in step.captures if capture.engine)
    assert engine.engine == "vllm"
    assert engine.decode.passes > engine.prefill.passes > 0
