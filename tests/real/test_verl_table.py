"""Settings and the traces that result from them, in real PPO runs of verl 0.9.1 with a critic and a reference.

The runs `critic` and `continuous` in the table say which step has which settings.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.support import truth
from tests.support.helpers import problems, wait_for_line
from tests.support.verl_runs import VerlRun, inside, metas, operators

# Stages of each worker in a step, in V1's order.
WORK = [
    "actor.compute_log_prob",
    "ref.compute_ref_log_prob",
    "critic.compute_values",
    "critic.update_critic",
    "actor.update_actor",
    "actor.update_weights",
]
UPDATES = ("critic.update_critic", "actor.update_actor")
BATCHES = ["mini_batch 0", "mini_batch 1"]
ENGINE = ["rollout.frontend", "rollout.rank0"]
EVERYTHING = {"cpu", "stack", "shapes", "memory", "module"}
# Steps of the trigger that waits, and all captured steps; earlier steps have other windows.
WAITED, CAPTURED = (7, 8), range(2, 9)
ROLES = ("trainer", "actor", "critic", "ref", "rollout")


def name(meta: dict[str, Any]) -> str:
    return f"{meta['role']}.{meta['part'] or meta['stage']}"


def ranks(run: VerlRun, step: int) -> dict[str, list[int]]:
    """Return the ranks of each role's stages, and of each part of the rollout."""
    found: dict[str, list[int]] = defaultdict(list)
    for meta in metas(run, step):
        found[name(meta)].append(meta["rank"])
    return {key: sorted(value) for key, value in found.items()}


def traces(run: VerlRun, step: int) -> dict[tuple[str, int], dict[str, Any]]:
    """Return each trace of a step, by name and rank."""
    found = {}
    for path in run.step_folder(step).glob("*.meta.json"):
        meta = json.loads(path.read_text())
        found[name(meta), meta["rank"]] = run.trace(step, path.name.removesuffix(".meta.json"))
    return found


def holds(trace: dict[str, Any]) -> set[str]:
    """Return the contents that a worker's trace has."""
    found = {"cpu"} if operators(trace) else set()
    if any(event.get("cat") == "python_function" for event in trace["traceEvents"]):
        found.add("stack")
    if any("Input Dims" in event.get("args", {}) for event in operators(trace)):
        found.add("shapes")
    if any(event["name"] == "[memory]" for event in trace["traceEvents"]):
        found.add("memory")
    if trace.get("with_modules"):
        found.add("module")
    return found


def ranges(trace: dict[str, Any]) -> list[str]:
    """Return autoprof's ranges in a trace, in order of time, outer ranges first."""
    ours = ("global_step ", "mini_batch ", *(f"{role}." for role in ROLES))
    found = [
        event
        for event in trace["traceEvents"]
        if event.get("cat") == "user_annotation" and event["name"].startswith(ours)
    ]
    return [event["name"] for event in sorted(found, key=lambda event: (event["ts"], -event["dur"]))]


@pytest.mark.parametrize(
    ("step", "stages", "workers", "contents"),
    [
        (2, ["ref.compute_ref_log_prob", "critic.compute_values", "critic.update_critic"], [0], {"cpu", "shapes"}),
        (3, ["ref.compute_ref_log_prob", "critic.compute_values", "critic.update_critic"], [0], {"cpu"}),
        (4, WORK, [0, 1], EVERYTHING),
        (5, WORK, [1], {"cpu"}),
    ],
)
def test_discrete_captures_have_the_requested_stages_ranks_and_contents(
    critic: VerlRun, step: int, stages: list[str], workers: list[int], contents: set[str]
) -> None:
    captured = dict.fromkeys([*stages, *ENGINE], workers)
    if step == 4:
        captured["trainer.compute_advantage"] = [0]
    assert ranks(critic, step) == captured
    for (what, rank), trace in traces(critic, step).items():
        if not what.endswith("frontend"):  # the front end computes nothing
            assert holds(trace) == contents, (what, rank)
        if what in WORK:
            batches = (BATCHES[1:] if step == 5 else BATCHES) if what in UPDATES else []
            assert ranges(trace) == [what, *batches]
            assert trace["distributedInfo"]["rank"] == rank


@pytest.mark.parametrize("step", [2, 3, 4, 5])
def test_each_trace_names_its_run_step_and_stage(critic: VerlRun, step: int) -> None:
    for (what, rank), trace in traces(critic, step).items():
        stamp = trace["autoprof"]
        assert (stamp["global_step"], stamp["rank"], stamp["run"]) == (step, rank, critic.directory.name)
        assert what == f"{stamp['role']}.{stamp.get('part') or stamp['stage']}"
        assert stamp["versions"]["torch"].startswith("2.13.0")


def test_roles_that_share_a_process_have_their_own_names(critic: VerlRun) -> None:
    pids = defaultdict(set)
    for meta in metas(critic, 4):
        pids[meta["pid"]].add(meta["role"])
    assert sorted(map(sorted, pids.values()))[:2] == [["actor", "critic", "ref"]] * 2


def test_a_window_can_use_another_tool(critic: VerlRun) -> None:
    actor = {stage: [0] for stage in WORK if stage.startswith("actor.")}
    assert ranks(critic, 6) == actor | {part: [0] for part in ENGINE}
    for meta in metas(critic, 6):
        # The front end uses no NPU.
        assert meta["tool"] == ("torch" if meta["part"] == "frontend" else "npu")
        assert (meta["state"], meta["reason"]) == ("complete", "")
        if meta["tool"] == "npu":
            assert (meta["contents"], meta["left_out"]) == (["cpu", "npu", "shapes"], [])
    folders = sorted(path.name.split(".rank0")[0] for path in critic.step_folder(6).glob("*_ascend_pt"))
    assert folders == sorted([*actor, "rollout.replica0"])
    for folder in critic.step_folder(6).glob("*_ascend_pt"):
        assert (folder / "ASCEND_PROFILER_OUTPUT" / "trace_view.json").exists()
        assert json.loads((folder / "profiler_metadata.json").read_text())["autoprof"]["global_step"] == 6
        (info,) = folder.glob("profiler_info*.json")
        common = json.loads(info.read_text())["config"]["common_config"]
        assert (common["record_shapes"], common["with_stack"]) == (True, False)


@pytest.mark.parametrize(
    ("step", "steps", "workers", "contents"), [(2, [2, 3], [0, 1], {"cpu"}), (5, [5], [1], EVERYTHING)]
)
def test_continuous_captures_have_the_requested_steps_ranks_and_contents(
    continuous: VerlRun, step: int, steps: list[int], workers: list[int], contents: set[str]
) -> None:
    whole = "actor+ref+critic.step"
    captured = dict.fromkeys([whole, *ENGINE], workers)
    if 0 in workers:
        captured["trainer.step"] = [0]
    assert ranks(continuous, step) == captured
    found = traces(continuous, step)
    for rank in workers:
        trace = found[whole, rank]
        assert holds(trace) == contents
        work = [*WORK[:4], *BATCHES, WORK[4], *BATCHES, WORK[5]]
        assert ranges(trace) == [entry for number in steps for entry in (f"global_step {number}", *work)]
        assert trace["autoprof"]["global_steps"] == steps
        assert trace["distributedInfo"]["rank"] == rank
    for meta in metas(continuous, step):
        assert (meta["state"], meta["reason"]) == ("complete", ""), meta


def test_the_second_of_two_joined_steps_has_only_the_engines_traces(continuous: VerlRun) -> None:
    assert ranks(continuous, 3) == {part: [0, 1] for part in ENGINE}


def test_engines_end_before_the_step_capture_of_their_device_begins(continuous: VerlRun) -> None:
    for step in (2, 5):
        engines = [meta["clock"]["stop"]["unix_ns"] for meta in metas(continuous, step) if name(meta) == ENGINE[1]]
        workers = [meta["clock"]["start"]["unix_ns"] for meta in metas(continuous, step) if "+" in meta["role"]]
        assert max(engines) < min(workers)


def test_a_continuous_run_is_without_problems(continuous: VerlRun) -> None:
    continuous.assert_sound()
    assert problems(continuous.directory) == []


def test_the_critic_is_captured_and_other_roles_are_not(critic: VerlRun) -> None:
    kinds = sorted({(meta["role"], meta["stage"]) for meta in metas(critic, 2)})
    critics = [("critic", "compute_values"), ("critic", "update_critic")]
    assert kinds == [*critics, ("ref", "compute_ref_log_prob"), ("rollout", "rollout")]
    names = {event["name"] for event in operators(critic.trace(2, "critic.update_critic"))}
    assert any(name.startswith("autograd::engine::evaluate_function") for name in names)


def test_a_window_can_be_opened_during_the_run(critic: VerlRun) -> None:
    assert (critic.folder / "trigger.txt").read_text().startswith(f"asked run {critic.directory.name} for steps 3, in ")
    found = metas(critic, 3)
    assert {meta["role"] for meta in found} == {"critic", "ref", "rollout"}
    assert {(meta["state"], *meta["contents"], *meta["left_out"]) for meta in found} == {("complete", "cpu")}
    names = [event["name"] for event in operators(critic.trace(3, "rollout.replica0.rank0"))]
    assert len([name for name in names if name.startswith("execute_")]) == 3


def test_rollout_iterations_are_exact(critic: VerlRun) -> None:
    names = [event["name"] for event in operators(critic.trace(2, "rollout.replica0.rank0"))]
    passes = [name for name in names if name.startswith("execute_")]
    assert len(passes) == 5
    # The first prefill is in the two skipped passes.
    assert not any("generation_0(0)" in name for name in passes)


def test_unsupported_contents_are_named_and_the_others_recorded(critic: VerlRun) -> None:
    for meta in metas(critic, 2):
        assert (meta["contents"], meta["left_out"]) == (["cpu", "shapes"], ["cuda"])
    for beginning in ("critic.update_critic", "rollout.replica0.rank0"):
        events = operators(critic.trace(2, beginning))
        assert any("Input Dims" in event.get("args", {}) for event in events)
    assert "torch does not support these contents here, so they are left out: cuda" in critic.finished.output


def test_the_command_at_the_end_finds_complete_files(critic: VerlRun) -> None:
    listed = wait_for_line(critic.folder / "finished.txt").split()
    assert listed == sorted(path.name for path in critic.step_folder(2).iterdir())
    assert len(listed) == 10


def test_torchs_annotations_show_fsdp1(critic: VerlRun) -> None:
    for stage in ("critic.update_critic", "ref.compute_ref_log_prob"):
        names = {event["name"] for event in operators(critic.trace(2, stage))}
        assert [name for name in names if "FullyShardedDataParallel" in name], stage


def test_both_steps_have_captures_of_all_roles(critic: VerlRun) -> None:
    folders = sorted(path.name for path in critic.directory.glob("global_step_*"))
    assert folders == [f"global_step_{step:06d}" for step in CAPTURED]
    for step in WAITED:
        found = metas(critic, step)
        assert {(meta["state"], meta["window"]) for meta in found} == {("complete", "autoprof trigger")}
        names = [path.name for path in critic.step_folder(step).glob("*.pt.trace.json.gz")]
        kinds = sorted(re.sub(r"(\.rank0|(?<=\.frontend))\..*", "", name) for name in names)
        assert kinds == sorted([*WORK, "trainer.compute_advantage", "rollout.replica0", "rollout.replica0.frontend"])


def test_the_waiting_trigger_prints_progress_and_the_paths_of_traces(critic: VerlRun) -> None:
    lines = (critic.folder / "trigger.txt").read_text().splitlines()
    first, second = WAITED
    # The other triggers did not wait.
    *others, waiting = [number for number, line in enumerate(lines) if line.startswith("asked run ")]
    assert len(others) == 4
    assert lines[waiting].startswith(f"asked run {critic.directory.name} for 2 steps from 7 on, in ")
    # Other lines about steps are left out: the command polls, and may miss a state.
    steps = [line for line in lines[waiting:] if line.startswith("step ")]
    assert [line for line in steps if "is captured" in line] == [
        f"step {first} is captured (1 of 2)",
        f"step {second} is captured (2 of 2)",
    ]
    assert lines[-4].startswith("captures: 18, ")
    assert lines[-3:] == [*(str(critic.step_folder(step)) for step in WAITED), "status 0"]


@pytest.mark.parametrize("step", [2, 5])
def test_each_answer_is_a_sample_and_both_replicas_have_requests(continuous: VerlRun, step: int) -> None:
    (whole,) = continuous.of("step", step)
    samples = continuous.of("sample", step)
    pairs = [(span["ids"]["sample"], span["ids"]["rollout"]) for span in samples]
    prompts = {sample for sample, _ in pairs}
    assert len(prompts) == 2
    assert sorted(pairs) == sorted((sample, rollout) for sample in prompts for rollout in (0, 1))
    requests = [span for span in continuous.of("request") if inside(span, whole)]
    assert len(requests) == 4
    assert {span["ids"]["replica"] for span in requests} == {0, 1}
    assert len(continuous.of("turn", step)) == len(continuous.of("reward", step)) == 4


def test_all_steps_are_on_the_timeline(critic: VerlRun) -> None:
    assert [span["step"] for span in critic.of("step")] == list(range(1, 10))


@pytest.mark.parametrize(("name", "asked"), [("critic", 5), ("continuous", 1)])
def test_all_requests_are_taken(name: str, asked: int, request: pytest.FixtureRequest) -> None:
    run: VerlRun = request.getfixturevalue(name)
    control = [path.suffix for path in Path(run.directory, "control").iterdir()]
    assert control == [".taken"] * asked


@pytest.mark.truth
@pytest.mark.parametrize("name", ["critic", "continuous"])
def test_stages_and_tokens_equal_those_that_verl_logs(
    name: str, request: pytest.FixtureRequest, record_property: truth.Record
) -> None:
    run: VerlRun = request.getfixturevalue(name)
    wrong = truth.verl_differences(run, truth.figures(run.directory))
    truth.row(record_property, f"verl {name}", "verl's timers and tokens", wrong)


@pytest.mark.truth
@pytest.mark.parametrize("name", ["critic", "continuous"])
def test_a_healthy_run_has_no_finding(name: str, request: pytest.FixtureRequest, record_property: truth.Record) -> None:
    run: VerlRun = request.getfixturevalue(name)
    truth.row(record_property, f"verl {name}", "no finding", truth.unconfirmed(truth.figures(run.directory)))
