"""Real GRPO runs of older releases of verl, with vLLM on the CPU, and their run directories."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.helpers import assert_no_failure, problems
from tests.support.release_runs import environment, package_of, version_of
from tests.support.verl_runs import VerlRun, inside, metas, operators

STEP = 2


def stages(name: str) -> set[str]:
    """Return the captures of a step, as the parts of their names that are the same in each run."""
    found = {
        "trainer.compute_advantage",
        "actor.compute_log_prob",
        "ref.compute_ref_log_prob",
        "actor.update_actor",
        "rollout.replica0",
        "rollout.replica0.frontend",
    }
    return found | {"actor.update_weights"} if version_of(name) >= (0, 7, 1) else found


def test_the_run_has_the_versions_of_its_release(name: str, run: VerlRun) -> None:
    assert run.info.versions["verl"] == name.removeprefix("verl-")
    assert run.info.versions["vllm"] == "0.27.1+cpu"


def test_all_steps_are_on_the_timeline_and_the_chosen_one_is_captured(run: VerlRun) -> None:
    assert [span["step"] for span in run.of("step")] == [1, 2, 3]
    assert [path.name for path in run.directory.glob("global_step_*")] == ["global_step_000002"]


def test_every_stage_and_the_rollout_are_captured_once(name: str, run: VerlRun) -> None:
    names = [path.name for path in run.step_folder(STEP).glob("*.pt.trace.json.gz")]
    kinds = sorted(re.sub(r"(\.rank0|(?<=\.frontend))\..*", "", name) for name in names)
    assert kinds == sorted(stages(name))


def test_every_capture_is_complete(name: str, run: VerlRun) -> None:
    found = metas(run, STEP)
    assert len(found) == len(stages(name))
    for meta in found:
        assert (meta["state"], meta["reason"]) == ("complete", ""), meta
        assert (meta["step"], meta["rank"], meta["tool"]) == (STEP, 0, "torch")
        assert meta["replica"] == (0 if meta["role"] == "rollout" else None)


def test_the_trace_of_the_actors_update_has_the_backward_pass(run: VerlRun) -> None:
    names = [event["name"] for event in operators(run.trace(STEP, "actor.update_actor"))]
    assert any(name.startswith("autograd::engine::evaluate_function") for name in names)


def test_the_trace_of_the_rollout_has_the_models_forward_passes(name: str, run: VerlRun) -> None:
    names = [event["name"] for event in operators(run.trace(STEP, "rollout.replica0.rank0"))]
    assert "aten::linear" in names or "aten::mm" in names
    # 4 prompts; a pass takes all that have arrived. Up to 0.6.1, an answer continues to the end of the context.
    passes = [name for name in names if name.startswith("execute_")]
    prompts = [int(found[1]) for name in passes if (found := re.search(r"_context_([1-9]\d*)\(", name))]
    assert 1 <= sum(prompts) <= 4
    assert len(prompts) < len(passes) <= 4 * CONTEXT
    (rollout,) = [meta for meta in metas(run, STEP) if meta["part"] == "rank0"]
    (update,) = [meta for meta in metas(run, STEP) if meta["stage"] == "update_actor"]
    # Up to 0.7.0, the engine's worker runs in the process of the trainer's worker.
    assert (rollout["pid"] == update["pid"]) == (version_of(name) <= (0, 7, 0))


def test_the_engine_stops_before_the_first_stage(run: VerlRun) -> None:
    (rollout,) = [meta for meta in metas(run, STEP) if meta["part"] == "rank0"]
    first = min(meta["clock"]["start"]["unix_ns"] for meta in metas(run, STEP) if meta["role"] in ("actor", "ref"))
    assert rollout["clock"]["stop"]["unix_ns"] < first


def test_each_step_generates_once(run: VerlRun) -> None:
    assert [span["step"] for span in run.of("stage") if span["name"] == "rollout"] == [1, 2, 3]


def test_weights_are_updated_in_each_step(name: str, run: VerlRun) -> None:
    assert {1, 2, 3} <= {span["step"] for span in run.of("stage") if span["name"] == "update_weights"}


def test_no_hook_failed_and_autoprof_has_no_errors(run: VerlRun) -> None:
    assert_no_failure(run.directory)
    assert "autoprof: " not in run.finished.output


def test_no_process_is_left_running(name: str, run: VerlRun) -> None:
    left = [title.strip() for title in run.finished.left_behind]
    # verl 0.5.0: the worker has a non-daemon thread that never ends, so the process stays if Ray asks it to exit
    # instead of killing it (vllm_rollout_spmd.py, `_loop_forever`).
    endless = package_of(name) / "verl" / "workers" / "rollout" / "vllm_rollout" / "vllm_rollout_spmd.py"
    of_verl = "threading.Thread(target=self._loop_forever)" in (endless.read_text() if endless.exists() else "")
    assert [title for title in left if not (of_verl and title == "ray::WorkerDict")] == []


def test_doctor_finds_no_problem_in_the_run(run: VerlRun) -> None:
    assert problems(run.directory) == []


def test_training_is_the_same_without_autoprof(run: VerlRun, run_off: VerlRun) -> None:
    assert not (run_off.folder / "autoprof_runs").exists()
    assert sorted(run.metrics) == sorted(run_off.metrics) == [1, 2, 3]
    for step, metrics in run.metrics.items():
        assert len(metrics) > 30
        assert metrics == run_off.metrics[step]


@pytest.fixture(scope="session")
def report(name: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the output of `autoprof doctor --deep --json` in the environment."""
    command = [sys.executable, "-m", "autoprof", "doctor", "--deep", "--json"]
    found = subprocess.run(
        command,
        cwd=tmp_path_factory.mktemp("doctor"),
        env=environment(name),
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return json.loads(found.stdout)


def test_doctor_finds_the_release_and_no_problem(name: str, report: dict[str, Any]) -> None:
    assert Path(package_of(name)).is_dir()
    assert report["facts"]["verl"] == name.removeprefix("verl-")
    assert report["problems"] == []


# Tokens of the longest answer with its prompt (release_command.py).
CONTEXT = 128
# Allowed reasons for a skipped hook.
REASONS = re.compile(
    r"verl is [\d.]+, the hook is for .*"
    r"|vllm is [\d.]+\+cpu, the hook is for .*"
    r"|importing .* raised ModuleNotFoundError: No module named '(sglang|megatron|torch_npu|nvtx|qwen_vl_utils)(\..*)?'"
    r"|(?!(verl|vllm|ray|transformers|accelerate) )\w+ is not installed"
    r"|there is no module verl\.[\w.]+ in this release"
)


def test_doctor_gives_the_reason_of_a_skipped_hook(report: dict[str, Any]) -> None:
    for key, state, reason in report["hooks"]:
        assert state in ("applied", "skipped"), (key, reason)
        if state == "skipped":
            assert REASONS.fullmatch(reason), (key, reason)


def test_doctor_finds_the_hooks_that_a_run_needs(name: str, report: dict[str, Any]) -> None:
    states = {key: state for key, state, _ in report["hooks"]}
    needed = ["verl/step-end", "verl/advantage", "verl/agent-loop", "vllm/worker"]
    if version_of(name) < (0, 6):
        needed += ["verl/step-begin-0.5", "verl/generate-0.5", "verl/vllm-server-0.5"]
    else:
        needed += ["verl/step-begin", "verl/vllm-server", "verl/own-profiler-start"]
    prefix = "" if version_of(name) >= (0, 8) else "fsdp-"
    for stage in ("compute-log-prob", "compute-ref-log-prob", "update-actor", "update-critic", "compute-values"):
        needed.append(f"verl/{prefix}{stage}")
    assert {key: states.get(key) for key in needed} == dict.fromkeys(needed, "applied")


PROMPTS = 4


@pytest.mark.parametrize("step", [1, 2, 3])
def test_every_sample_is_on_the_timeline_with_its_turn(name: str, run: VerlRun, step: int) -> None:
    (whole,) = run.of("step", step)
    samples = run.of("sample", step)
    assert len({span["ids"]["sample"] for span in samples}) == len(samples) == PROMPTS
    for sample in samples:
        assert inside(sample, whole)
        assert sample["role"] == "agent_loop"
        assert sample["ids"] | {"sample": 0} == {"sample": 0, "rollout": 0, "agent": "single_turn_agent"}
        mine = [span for span in run.spans if span.get("ids", {}).get("sample") == sample["ids"]["sample"]]
        (turn,) = [span for span in mine if span["kind"] == "turn" and span["step"] == step]
        assert inside(turn, sample)
        assert turn["ids"].items() >= sample["ids"].items()
        assert turn["ids"]["request"]
        assert 0 < turn["counts"]["prompt_tokens"] <= 64
        assert turn["counts"]["response_tokens"] > 0
        rewards = [span for span in mine if span["kind"] == "reward" and span["step"] == step]
        # Before 0.7, the driver computes the scores.
        assert len(rewards) == (1 if version_of(name) >= (0, 7) else 0)
        assert all(inside(reward, sample) and reward["start_ns"] >= turn["end_ns"] for reward in rewards)


def test_each_turn_is_one_request_of_the_server(run: VerlRun) -> None:
    turns, requests = run.of("turn"), run.of("request")
    assert len(turns) == len(requests) == 3 * PROMPTS
    for request in requests:
        assert (request["role"], request["ids"]["replica"]) == ("rollout", 0)
        around = [turn for turn in turns if inside(request, turn)]
        assert request["counts"] in [turn["counts"] for turn in around]


def test_the_drivers_timers_are_on_the_timeline(run: VerlRun) -> None:
    timers = {(span["step"], span["name"]) for span in run.of("timer")}
    assert {
        (step, name) for step in (1, 2, 3) for name in ("gen", "old_log_prob", "ref", "adv", "update_actor")
    } <= timers
