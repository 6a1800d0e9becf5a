"""Trainers of TRL and transformers in real runs on the CPU, with `AUTOPROF=1` before the command."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autoprof.report.remedies import SETTINGS, setting_names
from tests.support import engines, helpers, processes, truth
from tests.support.helpers import assert_no_failure, clean_environment, problems, wait_for_line
from tests.support.trl_runs import NAMES, SCRIPT, Ran

# Seconds of the slow reward in the script.
SLOW_S = 8.0


@pytest.fixture(scope="session", params=NAMES)
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Ran]:
    """Return a function that runs trainers of the script; each kind of run is made once."""
    python = engines.python_of(request.param)

    @functools.cache
    def run(*names: str, launcher: str = "", status: int = 0, **variables: str) -> Ran:
        folder = tmp_path_factory.mktemp("trl")
        start = [python, *([f"{Path(python).parent}/torchrun", "--nproc-per-node", "2"] if launcher else [])]
        environment = clean_environment(OMP_NUM_THREADS="1", **variables)
        finished = processes.run([*start, str(SCRIPT), *names], cwd=folder, env=environment, timeout_s=240)
        assert finished.status == status, finished.output
        assert finished.left_behind == []
        return Ran(folder, finished.output)

    return run


@pytest.fixture
def grpo(ran: Callable[..., Ran]) -> Ran:
    return ran("grpo", AUTOPROF="1")


@pytest.fixture
def accumulated(ran: Callable[..., Ran]) -> Ran:
    return ran("accumulated", AUTOPROF="1", AUTOPROF_STEPS="1:4")


@pytest.fixture
def scored(ran: Callable[..., Ran]) -> Ran:
    return ran("scored", AUTOPROF="1", AUTOPROF_STEPS="::1")


@pytest.fixture
def slowed(ran: Callable[..., Ran]) -> Ran:
    return ran("slowed", AUTOPROF="1", AUTOPROF_STEPS="", AUTOPROF_WHEN="step>8x, compute_reward>8x")


@pytest.fixture
def several(ran: Callable[..., Ran]) -> Ran:
    """Run a training that fails, and then two others in the same process."""
    return ran("failing", "sft", "rloo", AUTOPROF="1", AUTOPROF_STEPS="2", AUTOPROF_ROLLOUT_ITERATIONS="0:3")


@pytest.fixture
def plain(ran: Callable[..., Ran]) -> Ran:
    return ran("plain", AUTOPROF="1", AUTOPROF_ON_FINISH="echo $AUTOPROF_RUN_DIR >> finished")


@pytest.fixture
def both_ranks(ran: Callable[..., Ran]) -> Ran:
    return ran(
        "plain",
        launcher="torchrun",
        AUTOPROF="1",
        AUTOPROF_RANKS="all",
        AUTOPROF_ON_FINISH="find $AUTOPROF_RUN_DIR -name '*.gz' >> finished",
    )


def test_rollout_and_update_of_a_grpo_step_have_separate_traces(grpo: Ran) -> None:
    assert grpo.steps() == [2]
    assert grpo.names(2) == {"rollout.generate", "reward.compute_reward", "actor.update_actor", "actor.optimizer_step"}
    assert not any("Backward" in name for name in grpo.operators(2, "rollout.generate"))
    assert any("multinomial" in name for name in grpo.operators(2, "rollout.generate"))
    update = grpo.operators(2, "actor.update_actor")
    assert any("Backward" in name for name in update)
    assert not any("multinomial" in name for name in update)


def test_steps_have_the_numbers_that_the_trainer_logs(grpo: Ran) -> None:
    assert [span["step"] for span in grpo.spans("step")] == [1, 2, 3, 4]
    assert grpo.said["global_step"] == 4
    assert {span["step"] for span in grpo.spans()} == {1, 2, 3, 4}


@pytest.mark.truth
def test_steps_and_stages_take_the_seconds_that_the_trainer_logs(grpo: Ran, record_property: truth.Record) -> None:
    report, logged = truth.figures(grpo.run), grpo.said["timed"]["grpo"]
    wrong = truth.sum_differences(report, logged[-1]["train_runtime"])
    for row, line in zip(report.steps, logged[:-1], strict=True):
        # TRL's `step_time` has everything up to the optimizer, with the start and stop of profilers.
        inner = sum(row.stages.get(name, 0.0) for name in ("generate", "compute_reward", "update_actor"))
        if not inner <= line["step_time"] <= row.seconds:
            wrong.append(f"step {row.number} {inner:.3f} to {row.seconds:.3f} s, not {line['step_time']:.3f} s")
    truth.row(record_property, "TRL GRPO", "TRL's step_time and train_runtime", wrong)


@pytest.mark.truth
def test_the_tokens_are_those_that_the_trainer_logs(
    grpo: Ran, scored: Ran, several: Ran, record_property: truth.Record
) -> None:
    wrong = []
    # A batch has 4 answers, and `scored` generates 2 batches at a time. Its evaluations don't count.
    for ran, name, loop, answers in ((grpo, "grpo", 0, 4), (scored, "scored", 0, 8), (several, "rloo", 2, 4)):
        lines = {line["step"]: line.get("completions/mean_length", 0) for line in ran.said[name] if "loss" in line}
        logged = {step: round(mean * answers) or None for step, mean in lines.items()}
        report = truth.figures(ran.run)
        steps = report.loops[loop].steps if report.loops else report.steps
        counted = {row.number: row.response_tokens for row in steps}
        wrong += [f"{name} {counted}, not {logged}"] if counted != logged else []
    truth.row(record_property, "TRL GRPO and RLOO", "TRL's completions/mean_length", wrong)


@pytest.mark.truth
def test_healthy_trainings_have_no_finding(
    grpo: Ran, accumulated: Ran, scored: Ran, plain: Ran, record_property: truth.Record
) -> None:
    named = {"GRPO": grpo, "accumulation": accumulated, "log probs": scored, "transformers": plain}
    wrong = [f"{name}: {text}" for name, ran in named.items() for text in truth.unconfirmed(truth.figures(ran.run))]
    truth.row(record_property, "TRL, four trainings", "no finding", wrong)


@pytest.mark.truth
def test_a_slow_reward_is_the_first_finding(slowed: Ran, record_property: truth.Record) -> None:
    report = truth.figures(slowed.run)
    wrong = truth.finding_differences(report, "slow_reward", 9, (), SLOW_S)
    reported_s = report.findings[0].seconds if report.findings else 0.0
    expected = "slow_reward of step 9"
    truth.row(record_property, "TRL reward", expected, wrong, planted_s=SLOW_S, reported_s=reported_s)


def test_training_is_the_same_without_autoprof(grpo: Ran, ran: Callable[..., Ran]) -> None:
    without = ran("grpo")
    assert without.said["autoprof"] == []
    assert list(without.folder.glob("autoprof_runs")) == []
    assert "autoprof" in grpo.said["autoprof"]
    assert without.said["grpo"] == grpo.said["grpo"]
    assert any(line.get("loss") for line in grpo.said["grpo"])


def test_a_step_can_have_several_updates_and_no_rollout(accumulated: Ran) -> None:
    updates = {"actor.update_actor", "actor.update_actor.2", "actor.optimizer_step"}
    rollout = {"rollout.generate", "reward.compute_reward"}
    assert accumulated.steps() == [1, 2, 3]
    found = {step: accumulated.names(step) for step in accumulated.steps()}
    scores = {name for names in found.values() for name in names} - updates - rollout
    assert scores <= {"actor.compute_log_prob", "actor.compute_log_prob.2"}
    assert {step: names - scores for step, names in found.items()} == {
        1: updates | rollout,
        2: updates,
        3: updates | rollout,
    }


def test_log_probs_are_a_stage_unless_the_loss_computes_them(scored: Ran) -> None:
    assert "actor.compute_log_prob" in scored.names(1)
    assert "actor.compute_log_prob" not in scored.names(2)
    inside = [span["name"] for span in scored.spans() if span["step"] == 2]
    assert "update_actor" in inside
    assert "compute_log_prob" not in inside


def test_an_evaluation_is_on_the_timeline_but_in_no_trace(scored: Ran) -> None:
    evaluations = [span for span in scored.spans() if span["name"] == "evaluate"]
    assert [span["step"] for span in evaluations] == [None, 2, 4]
    assert "rollout.generate" not in scored.names(2)
    assert scored.steps() == [1, 2, 3, 4]


def test_the_step_after_a_slow_one_is_captured_with_its_reason(slowed: Ran) -> None:
    assert slowed.steps() == [10]
    assert {"rollout.generate", "reward.compute_reward", "actor.update_actor"} <= slowed.names(10)
    metas = [json.loads(path.read_text()) for path in slowed.run.glob("global_step_000010/*.meta.json")]
    (why,) = {meta["window"] for meta in metas}
    times = r"[0-9.]+ times the median of [0-9.]+ (m|µ)?s"
    step = rf"step 9 took [89]\.[0-9]+ s, {times} \(step>8x\)"
    stage = rf"compute_reward took 8\.[0-9]+ s in step 9, {times} \(compute_reward>8x\)"
    assert re.fullmatch(f"{step}; {stage}", why), why


def test_a_failed_training_does_not_affect_the_next_one(several: Ran) -> None:
    assert several.said["raised"] == """KeyError("the user's own")"""
    captures = several.captures(2)
    assert captures.pop("actor.update_actor@0") == "truncated"
    assert set(captures.values()) == {"complete"}
    failed = [span for span in several.spans("step") if "error" in span]
    assert [(span["step"], span["error"]) for span in failed] == [(2, "KeyError")]


def test_sft_and_rloo_share_the_recipes(several: Ran) -> None:
    # The failed training came first. Each trainer has a loop.
    grpo, sft, rloo = ({name.removesuffix("@0") for name in several.captures(2, loop)} for loop in (1, 2, 3))
    assert grpo - {"actor.compute_log_prob"} == {"rollout.generate", "reward.compute_reward", "actor.update_actor"}
    assert sft == {"trainer.training_step", "trainer.optimizer_step"}
    assert rloo - {"actor.compute_log_prob"} == {*grpo - {"actor.compute_log_prob"}, "actor.optimizer_step"}
    assert len(several.spans("step")) == 2 + 4 + 4


def test_a_rollout_has_the_requested_number_of_forward_passes(several: Ran, grpo: Ran) -> None:
    # Each pass begins with the model's only embedding.
    assert several.operators(2, "rollout.generate")["aten::embedding"] == 3
    assert grpo.operators(2, "rollout.generate")["aten::embedding"] > 3


def test_transformers_own_trainer_is_captured(plain: Ran) -> None:
    assert plain.steps() == [2]
    assert plain.names(2) == {"trainer.training_step", "trainer.optimizer_step", "trainer.save_checkpoint"}
    assert any("Backward" in name for name in plain.operators(2, "trainer.training_step"))
    (step,) = [span for span in plain.spans("step") if span["step"] == 2]
    late = [span for span in plain.spans() if span["step"] == 2 and span["name"] in ("evaluate", "save_checkpoint")]
    assert len(late) == 2
    assert all(step["start_ns"] < span["start_ns"] <= span["end_ns"] <= step["end_ns"] for span in late)
    assert wait_for_line(plain.folder / "finished").split() == [str(plain.run)]


def test_all_ranks_of_torchrun_have_captures_in_one_run(both_ranks: Ran) -> None:
    captures = both_ranks.captures(2)
    for name in ("trainer.training_step", "trainer.optimizer_step", "trainer.save_checkpoint"):
        assert captures[f"{name}@0"] == captures[f"{name}@1"] == "complete"
    assert len(both_ranks.processes()) == 2
    assert {span["rank"] for span in both_ranks.spans("step")} == {0, 1}
    # The command at the end ran once, after all ranks had written their files.
    assert len(wait_for_line(both_ranks.folder / "finished").split()) == len(captures)
    run = json.loads((both_ranks.run / "run.json").read_text())
    assert run["state"] == "ended"
    assert "torchrun" in run["command"]


def test_only_rank_0_of_torchrun_is_captured_by_default(ran: Callable[..., Ran]) -> None:
    ranks = ran("plain", launcher="torchrun", AUTOPROF="1")
    assert ranks.steps() == [2]
    assert {name.rpartition("@")[2] for name in ranks.captures(2)} == {"0"}
    assert {span["rank"] for span in ranks.spans("step")} == {0, 1}


@pytest.mark.fault("a rank is late for a collective", "continues", "nothing; doctor names the late rank")
def test_a_rank_that_does_not_join_a_collective_is_named(ran: Callable[..., Ran], thorough: None) -> None:
    late = ran("late", launcher="torchrun", AUTOPROF="1", AUTOPROF_STEPS="", AUTOPROF_WHEN="hang>20s")
    assert late.said["global_step"] == 4
    folder = late.run / "hangs" / "step_000003"
    ranks = {each["rank"]: each for each in (json.loads(path.read_text()) for path in folder.glob("*-[0-9]*.json"))}
    stacks = {rank: [frame["function"] for frame in each["threads"][0]["frames"]] for rank, each in ranks.items()}
    assert sorted(stacks) == [0, 1]
    assert stacks[1][-1].endswith("fetch_score")
    assert not any("fetch_score" in name for name in stacks[0])
    assert ranks[1]["spans"][0]["kind"] == "step"
    command = ["-m", "torch.distributed.flight_recorder.fr_trace", str(folder), "--prefix", "rank_"]
    analysed = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=100, check=False)
    assert "missing ranks: {1}" in analysed.stdout + analysed.stderr
    assert len([line for line in late.output.splitlines() if "step 3 has taken" in line]) == 1
    where = (
        r"step 3 was stuck for .*: reward rank 1 had not joined \w+ #\d+ in .*; it was in trainers.py:\d+ fetch_score"
    )
    assert re.fullmatch(where, problems(late.run)[0])


@pytest.mark.fault("a rank of torchrun is killed", "ends as without autoprof", "nothing; doctor names the rank")
def test_a_rank_that_is_killed_is_named(ran: Callable[..., Ran], thorough: None) -> None:
    killed = ran("killed", launcher="torchrun", status=1, AUTOPROF="1", AUTOPROF_STEPS="")
    assert problems(killed.run)[0] == "reward rank 1 was killed by SIGKILL in compute_reward of step 3"


def test_a_wrong_setting_is_reported_once_for_all_ranks(ran: Callable[..., Ran]) -> None:
    wrong = ran("plain", launcher="torchrun", AUTOPROF="1", AUTOPROF_STEPS="x")
    assert wrong.said["global_step"] == 4
    assert all(f"{name}.".startswith(("autoprof._boot.", "autoprof.__")) for name in wrong.said["autoprof"])
    assert len([line for line in wrong.output.splitlines() if "AUTOPROF_STEPS" in line]) == 1


@pytest.mark.parametrize("name", ["grpo", "accumulated", "scored", "slowed", "several", "plain", "both_ranks"])
def test_no_hook_failed_and_autoprof_has_no_error(ran: Any, name: str, request: pytest.FixtureRequest) -> None:
    run: Ran = request.getfixturevalue(name)
    assert_no_failure(run.run)


@pytest.mark.parametrize("name", NAMES)
def test_doctor_gives_the_reason_of_each_skipped_hook(name: str, tmp_path: Path) -> None:
    doctor = Path(engines.python_of(name)).with_name("autoprof")
    command = [str(doctor), "doctor", "--deep", "--json"]
    result = helpers.run(command, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    hooks = {key: (state, reason) for key, state, reason in json.loads(result.stdout)["hooks"]}
    ours = {key: hook for key, hook in hooks.items() if key.partition("/")[0] in ("trl", "transformers")}
    assert len(ours) > 15
    version = name.partition("-")[2]
    for key, (state, reason) in ours.items():
        assert state == "applied" or reason.startswith(f"trl is {version}, the hook is for "), (key, state, reason)
    assert ours["trl/profiling-enter"][0] == "applied" or version.startswith("0.2")


@pytest.mark.parametrize("name", NAMES)
def test_the_settings_that_remedies_name_exist(name: str) -> None:
    fields_code = "(field.name for field in dataclasses.fields(trl.GRPOConfig))"
    code = f"import dataclasses, trl; print(trl.__version__, *{fields_code})"
    printed = helpers.run([engines.python_of(name), "-c", code], cwd=Path.cwd()).stdout.splitlines()[-1]
    release, *fields = printed.split()
    names = [setting for topic in SETTINGS["trl"] for setting in setting_names("trl", release, topic)]
    assert names
    assert set(names) <= set(fields)
