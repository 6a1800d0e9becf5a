"""Script with vLLM's `LLM` under autoprof, without a trainer: each call that generates is a step."""

from __future__ import annotations

import gzip
import json
import re

import pytest

from tests.support.helpers import assert_no_failure, spans
from tests.support.vllm_runs import SCRIPT, Driven, drive

OFFLINE = SCRIPT.with_name("offline.py")
# Step 6 is a beam search; in step 8 the user profiles.
STEPS = "2,4,6,8,9"
# A call that takes 150 times as long as the others opens a window in the next step. A busy machine does not reach 60.
WHEN, LONG = "step>60x", 18


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Driven:
    """Run with the engine in separate processes, and no profiler configured."""
    return drive(tmp_path_factory.mktemp("apart"), "apart", script=OFFLINE, AUTOPROF_STEPS=STEPS, AUTOPROF_WHEN=WHEN)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Driven:
    """Run with the engine and its worker in the script's process, and vLLM's profiler configured by the user."""
    folder = tmp_path_factory.mktemp("here")
    arguments = ("here", str(folder / "users"))
    variables = {"AUTOPROF_STEPS": STEPS, "AUTOPROF_WHEN": WHEN, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    return drive(folder, *arguments, script=OFFLINE, **variables)


@pytest.fixture(scope="module", params=["apart", "here"])
def driven(request: pytest.FixtureRequest) -> Driven:
    return request.getfixturevalue(request.param)


def steps(driven: Driven) -> list[int]:
    return sorted(int(path.name.rpartition("_")[2]) for path in driven.step(1).parent.glob("global_step_*"))


def passes(driven: Driven, step: int) -> int:
    """Return the number of forward passes in the only complete trace of a step's worker."""
    (meta,) = driven.step(step).glob("rollout.replica0.rank0.*.meta.json")
    assert json.loads(meta.read_text())["state"] == "complete"
    (trace,) = driven.step(step).glob("rollout.replica0.rank0.*.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return sum(str(event.get("name")).startswith("execute_") for event in events)


def test_the_chosen_calls_are_captured(driven: Driven) -> None:
    assert passes(driven, 2) in (6, 7)
    # Three requests of 12 tokens. Each may begin one pass after the one before it, and one more pass may follow.
    assert passes(driven, 4) in range(12, 16)
    assert passes(driven, 9) in (6, 7)


def test_a_beam_search_is_one_step(driven: Driven) -> None:
    # At least one pass for each of the four tokens.
    assert passes(driven, 6) in range(4, 20)


def test_the_engine_always_generates_the_same_tokens(driven: Driven) -> None:
    (tokens,) = driven.said["last"]
    assert len(tokens) == 6
    assert driven.said["batches"] == [[tokens]] * 3
    assert [one[:6] for one in driven.said["three at once"]] == [tokens] * 3
    assert driven.said["seventh"] == driven.said["eighth"] == driven.said["ninth"] == [tokens]


def test_every_call_is_a_step_of_the_timeline(driven: Driven) -> None:
    assert [span["step"] for span in spans(driven.step(1).parent) if span["kind"] == "step"][:9] == list(range(1, 10))


def test_the_users_profiler_takes_precedence(apart: Driven, here: Driven) -> None:
    assert here.said["user start"] == here.said["user stop"] == "ok"
    assert len(list((here.folder / "users").glob("*.gz"))) == 1
    assert steps(here) == [2, 4, 6, 9, LONG + 1]
    # If no profiler is configured, the user's call fails as without autoprof, and autoprof can capture step 8.
    assert apart.said["user start"] == apart.said["user stop"] == "Exception"
    assert steps(apart) == [2, 4, 6, 8, 9, LONG + 1]


def test_the_call_after_a_slow_one_is_captured_with_its_reason(driven: Driven) -> None:
    assert passes(driven, LONG + 1) in (6, 7)
    whys = {number: {meta["window"] for meta in driven.metas(number)} for number in (9, LONG + 1)}
    assert whys[9] == {f"AUTOPROF_STEPS={STEPS}"}
    (why,) = whys[LONG + 1]
    said = rf"step {LONG} took [0-9.]+ m?s, [0-9.]+ times the median of [0-9.]+ m?s \(step>60x\)"
    assert re.fullmatch(said, why), why


def test_the_engine_works_after_a_refused_request(driven: Driven) -> None:
    assert driven.said["refused"] is True


def test_autoprof_has_no_errors_and_no_hook_failed(driven: Driven) -> None:
    assert_no_failure(driven.step(1).parent)
