"""Real AsyncLLM of the installed vLLM and of each other release, called as verl's server calls it."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines import NAMES, python_of
from tests.support.helpers import assert_no_failure, processes_of, wait_for
from tests.support.vllm_runs import FAULTS, SCRIPT, Driven, drive, drive_faults, recorded_what_was_asked_for, survived

# The release that verl's runs use is in this environment, not in a separate one.
INSTALLED = "vllm-0.27.1"
RELEASES = [INSTALLED, *(name for name in NAMES if name.startswith("vllm-"))]
TOKENS = 6
# vLLM's asynchronous scheduling may run one more pass before it knows that the last token is done.
WHOLE = (TOKENS, TOKENS + 1)
# Steps of which only the second and third pass are requested, and a step in which no pass runs.
BOUNDED, WITHOUT_PASSES = (6, 7), 8


@pytest.fixture(scope="session")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Driven]:
    """Return a function that makes a run of a kind in a release; each is made once."""

    @functools.cache
    def run(release: str, kind: str) -> Driven:
        if (release, kind) == (INSTALLED, "configured"):
            request.getfixturevalue("thorough")
        python = sys.executable if release == INSTALLED else python_of(release)
        folder = tmp_path_factory.mktemp(f"{release}-{kind}")
        if kind == "faulty":
            return drive_faults(folder, python)
        arguments = ["configured", str(folder / "users")] if kind == "configured" else ["plain"]
        return drive(folder, *arguments, python=python)

    return run


@pytest.fixture(params=RELEASES)
def release(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def plain(runs: Any, release: str) -> Driven:
    """Run without a configured profiler."""
    return runs(release, "plain")


@pytest.fixture
def configured(runs: Any, release: str) -> Driven:
    """Run with vLLM's own profiler configured by the user."""
    return runs(release, "configured")


@pytest.fixture
def faulty(runs: Any, release: str) -> Driven:
    """Run with all faults of files, and with contents that vLLM does not support."""
    return runs(release, "faulty")


@pytest.fixture(params=["plain", "configured"])
def driven(runs: Any, release: str, request: pytest.FixtureRequest) -> Driven:
    return runs(release, request.param)


def test_the_engine_is_of_the_requested_release(plain: Driven, release: str) -> None:
    assert plain.meta(1)["versions"]["vllm"].partition("+")[0] == release.removeprefix("vllm-")


def test_two_windows_without_a_restart_have_separate_folders(driven: Driven) -> None:
    for step in (1, 2):
        assert (driven.said[f"start {step}"], driven.said[f"stop {step}"]) == ({"problem": ""}, {"problem": ""})
        assert driven.passes(step) in WHOLE
        meta = driven.meta(step)
        assert (meta["state"], meta["reason"], meta["step"], meta["rank"]) == ("complete", "", step, 4)
        assert meta["replica"] == 1
    assert driven.passes(1) == driven.passes(2)


def test_a_capture_without_any_work_is_complete_and_empty(driven: Driven) -> None:
    assert driven.said["start 3"] == driven.said["stop 3"] == {"problem": ""}
    assert driven.passes(3) == 0
    assert (driven.meta(3)["state"], driven.meta(3)["reason"]) == ("complete", "the engine ran no forward pass")


def test_the_engine_always_generates_the_same_tokens(driven: Driven) -> None:
    assert len(driven.said["before"]) == TOKENS
    assert driven.said["before"] == driven.said["recorded"] == driven.said["after"]
    assert [driven.said[f"recorded {step}"] for step in BOUNDED] == [driven.said["before"]] * 2


def test_a_second_start_and_a_second_stop_are_refused(driven: Driven) -> None:
    assert driven.said["start again"] == {"problem": "it is recording already"}
    assert driven.said["stop again"] == driven.said["stop without start"] == {"problem": "it was not recording"}


def test_exactly_the_requested_passes_are_recorded(driven: Driven) -> None:
    for step in BOUNDED:
        assert driven.said[f"stop {step}"] == {"problem": ""}
        assert driven.meta(step)["state"] == "complete"
        assert driven.passes(step) == driven.annotations(step, "process_outputs") == 2


def test_a_capture_whose_passes_never_came_has_failed_with_a_reason(driven: Driven) -> None:
    reason = "the engine ran 0 forward passes; recording was to begin after 1"
    meta = driven.meta(WITHOUT_PASSES)
    assert driven.said[f"stop {WITHOUT_PASSES}"] == {"problem": reason}
    assert (meta["state"], meta["reason"]) == ("failed", reason)


def test_requested_contents_are_recorded_and_unsupported_ones_are_named(plain: Driven, faulty: Driven) -> None:
    recorded_what_was_asked_for(faulty, plain)


def test_the_users_own_calls_behave_as_without_autoprof(plain: Driven, configured: Driven) -> None:
    assert plain.said["user before"] == plain.said["user during"] == plain.said["user after"] == "Exception"
    assert configured.said["user before"] == configured.said["user during"] == configured.said["user after"] == "ok"
    theirs = configured.folder / "users"
    assert len(list(theirs.glob("*async_llm*.gz"))) == 4
    assert len(list(theirs.glob("*rank*.gz"))) == 4


def test_the_users_arguments_reach_the_engine(configured: Driven, release: str) -> None:
    # One start has a prefix. Up to 0.31, vLLM uses only the prefix of the first start, which had none.
    honoured = release not in (INSTALLED, "vllm-0.30.0")
    theirs = configured.folder / "users"
    assert len(list(theirs.glob("mine_*rank*.gz"))) == len(list(theirs.glob("mine_*async_llm*.gz"))) == honoured


def test_the_users_profiler_ends_autoprofs_capture(driven: Driven, configured: Driven) -> None:
    meta = driven.meta(4)
    assert (meta["state"], meta["reason"]) == ("truncated", "another caller started the engine's profiler")
    assert driven.passes(4) in WHOLE
    assert driven.said["user during"] == driven.said["user after"]
    assert driven.said["stop 4"] == {"problem": "it was not recording"}
    assert configured.said["start during the user's"] == {"problem": "another caller is profiling the engine"}
    assert not configured.step(5).exists()


def test_no_hook_failed_and_no_part_files_remain(driven: Driven) -> None:
    assert_no_failure(driven.folder / "autoprof_runs" / "latest")


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
    assert len(faulty.said["before"]) == TOKENS
    assert faulty.said[f"after a {call}"] == faulty.said["before"]


def test_the_front_end_is_recorded_beside_its_worker(driven: Driven) -> None:
    for step in (1, 2):
        (meta,) = [meta for meta in driven.metas(step) if meta["part"] == "frontend"]
        assert (meta["state"], meta["reason"], meta["rank"], meta["contents"]) == ("complete", "", 4, ["cpu"])
        assert meta["pid"] != driven.meta(step)["pid"]
        assert driven.annotations(step, "add_request") == 1
        assert driven.annotations(step, "process_outputs") in WHOLE


def test_the_main_hooks_of_the_recipe_are_applied(plain: Driven) -> None:
    applied = set()
    for process in processes_of(plain.folder / "autoprof_runs" / "latest"):
        applied |= {key for key, hook in process["hooks"].items() if hook["state"] == "applied"}
    assert {"vllm/worker", "vllm/start-profile", "vllm/stop-profile"} <= applied


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
