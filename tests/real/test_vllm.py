"""Real AsyncLLM, called as verl's server calls it, with and without a profiler configured by the user."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.helpers import wait_for
from tests.support.vllm_runs import FAULTS, SCRIPT, Driven, drive, drive_faults, recorded_what_was_asked_for, survived


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Driven:
    return drive(tmp_path_factory.mktemp("plain"), "plain")


@pytest.fixture(scope="module")
def configured(thorough: None, tmp_path_factory: pytest.TempPathFactory) -> Driven:
    folder = tmp_path_factory.mktemp("configured")
    return drive(folder, "configured", str(folder / "users"))


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Driven:
    return drive_faults(tmp_path_factory.mktemp("faulty"))


@pytest.fixture(scope="module", params=["plain", "configured"])
def driven(request: pytest.FixtureRequest) -> Driven:
    found: Driven = request.getfixturevalue(request.param)
    return found


def test_each_capture_is_in_its_steps_folder(driven: Driven) -> None:
    assert driven.said["start 1"] == driven.said["stop 1"] == {"problem": ""}
    assert driven.said["start 2"] == driven.said["stop 2"] == {"problem": ""}
    # 6 tokens. vLLM's asynchronous scheduling may run one more pass before it knows that the last token is done.
    assert driven.passes(1) == driven.passes(2)
    assert driven.passes(1) in (6, 7)
    found = driven.meta(1)
    assert (found["state"], found["rank"], found["replica"], found["step"]) == ("complete", 4, 1, 1)


def test_a_second_start_and_a_second_stop_are_refused(driven: Driven) -> None:
    assert driven.said["start again"] == {"problem": "it is recording already"}
    assert driven.said["stop again"] == driven.said["stop without start"] == {"problem": "it was not recording"}


def test_the_engine_always_generates_the_same_tokens(driven: Driven) -> None:
    assert len(driven.said["before"]) == 6
    assert driven.said["before"] == driven.said["recorded"] == driven.said["after"]


def test_a_capture_without_any_work_is_complete_and_empty(driven: Driven) -> None:
    assert driven.said["start 3"] == driven.said["stop 3"] == {"problem": ""}
    assert driven.passes(3) == 0
    assert (driven.meta(3)["state"], driven.meta(3)["reason"]) == ("complete", "the engine ran no forward pass")


def test_the_users_own_calls_behave_as_without_autoprof(plain: Driven, configured: Driven) -> None:
    assert plain.said["user before"] == plain.said["user after"] == "Exception"  # no profiler is configured
    assert configured.said["user before"] == configured.said["user after"] == "ok"
    theirs = configured.folder / "users"
    assert len(list(theirs.glob("*async_llm*.gz"))) == 4
    assert len(list(theirs.glob("*rank*.gz"))) == 4


def test_the_users_profiler_ends_autoprofs_capture(driven: Driven) -> None:
    assert driven.said["user during"] == driven.said["user after"]
    assert driven.said["stop 4"] == {"problem": "it was not recording"}
    found = driven.meta(4)
    assert (found["state"], found["reason"]) == ("truncated", "another caller started the engine's profiler")
    assert driven.passes(4) in (6, 7)


def test_autoprof_does_not_start_while_the_users_profiler_runs(configured: Driven) -> None:
    assert configured.said["start during the user's"] == {"problem": "another caller is profiling the engine"}
    assert not configured.step(5).exists()


def test_no_part_files_remain(driven: Driven) -> None:
    assert list(driven.folder.rglob("*.part")) == []


@pytest.mark.fault(
    "vLLM: folders, disk space, start or stop fail",
    "generates the same tokens",
    "the traces; meta files say `failed` or `truncated` and why",
)
@pytest.mark.parametrize("fault", FAULTS)
def test_the_engine_works_after_a_fault_and_the_meta_file_has_the_reason(faulty: Driven, fault: str) -> None:
    survived(faulty, fault)


@pytest.mark.parametrize("call", ["stop without start", "second start", "second stop"])
def test_the_engine_generates_after_a_call_out_of_turn(faulty: Driven, call: str) -> None:
    assert len(faulty.said["before"]) == 6
    assert faulty.said[f"after a {call}"] == faulty.said["before"]


def test_requested_contents_are_recorded_and_unsupported_ones_are_named(faulty: Driven, plain: Driven) -> None:
    recorded_what_was_asked_for(faulty, plain)


def test_the_front_end_is_recorded_beside_its_worker(driven: Driven) -> None:
    for step in (1, 2):
        (meta,) = [meta for meta in driven.metas(step) if meta["part"] == "frontend"]
        assert (meta["state"], meta["reason"], meta["rank"], meta["contents"]) == ("complete", "", 4, ["cpu"])
        assert meta["pid"] != driven.meta(step)["pid"]
        assert driven.annotations(step, "add_request") == 1
        assert driven.annotations(step, "process_outputs") in (6, 7)


@pytest.mark.parametrize(("ranks", "recorded"), [("all", [2, 3]), ("3", [3])])
def test_each_selected_tensor_parallel_rank_has_a_trace(
    tmp_path: Path, request: pytest.FixtureRequest, ranks: str, recorded: list[int]
) -> None:
    if ranks == "all":
        request.getfixturevalue("thorough")
    variables = {"AUTOPROF_RANKS": ranks, "AUTOPROF_CONTENTS": "cpu,merge-profiles"}
    driven = drive(tmp_path, script=SCRIPT.with_name("tensor_parallel.py"), **variables)
    assert driven.said["start"] == driven.said["stop"] == {"problem": ""}
    assert driven.said["before"] == driven.said["after"]
    metas = [meta for meta in driven.metas(1) if meta["tool"] == "torch"]
    assert sorted(meta["rank"] for meta in metas if meta["part"] != "frontend") == recorded
    assert {meta["state"] for meta in metas} == {"complete"}
    assert all(meta["left_out"] == [] for meta in metas)
    traces = sorted(path.name for path in driven.step(1).glob("rollout.replica1.[fr]*.gz"))
    assert len(traces) == len(recorded) + 1
    # A separate process merges after the run.
    merged = json.loads(wait_for(driven.step(1) / "rollout.replica1.merged.meta.json"))
    assert (merged["state"], sorted(merged["merged"])) == ("complete", traces)
