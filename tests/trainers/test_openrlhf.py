"""OpenRLHF in real runs on the CPU: Ray, DeepSpeed, and vLLM engines in its `RolloutRayActor`."""

from __future__ import annotations

import gzip
import json
import re
import sys
from pathlib import Path

import pytest

from autoprof.report.model import OWN
from autoprof.report.remedies import SETTINGS, setting_names
from tests.real.assets import tiny_model
from tests.support import trainer_runs, truth
from tests.support.helpers import ROOT
from tests.support.trl_runs import Ran

SCRIPTS = trainer_runs.SCRIPTS / "openrlhf"
# Patches of vLLM with which new weights can be loaded on a CPU.
CPU = ROOT / "examples" / "verl_cpu" / "cpu"
# A quiet machine with 2 cores needs a minute and a half.
TIMEOUT_S = 900
# GPUs of two engines, an actor and a reference model.
GPUS = 4
ARGUMENTS = {
    "actor.num_gpus_per_node": "1",
    "actor.num_nodes": "1",
    "ref.num_gpus_per_node": "1",
    "ref.num_nodes": "1",
    "reward.remote_url": str(SCRIPTS / "reward.py"),
    "data.input_key": "question",
    "data.label_key": "answer",
    "data.apply_chat_template": None,
    "data.max_len": "64",
    "data.max_samples": "8",
    "rollout.batch_size": "4",
    "rollout.n_samples_per_prompt": "2",
    "rollout.micro_batch_size": "4",
    "rollout.max_new_tokens": "8",
    "train.batch_size": "8",
    "train.micro_batch_size": "4",
    "vllm.num_engines": "2",
    "vllm.tensor_parallel_size": "1",
    "vllm.sync_backend": "gloo",
    "vllm.enforce_eager": None,
    "vllm.gpu_memory_utilization": "0.1",
    "ds.zero_stage": "2",
    "ds.param_dtype": "bf16",
    "ds.attn_implementation": "eager",
    "algo.kl.init_coef": "0.01",
    "algo.advantage.estimator": "group_norm",
    "eval.steps": "-1",
    "ckpt.save_steps": "-1",
}

PPO: dict[str, str | None] = {
    "critic.num_nodes": "1",
    "critic.num_gpus_per_node": "1",
    "algo.advantage.estimator": "gae",
    "algo.kl.init_coef": "0",
    "vllm.num_engines": "1",
    "ckpt.save_steps": "2",
}


def train(folder: Path, *, gpus: int = GPUS, arguments: dict[str, str | None], **variables: str) -> Ran:
    """Train in a folder with OpenRLHF's own command line."""
    packages = trainer_runs.packages_of("openrlhf")
    prompts = folder / "prompts.jsonl"
    prompts.write_text(
        "".join(json.dumps({"question": f"What is {n} plus 1?", "answer": n + 1}) + "\n" for n in range(24))
    )
    given = ARGUMENTS | {
        "actor.model_name_or_path": tiny_model(),
        "data.prompt_dataset": str(prompts),
        "ckpt.output_dir": str(folder / "model"),
        "ckpt.path": str(folder / "checkpoints"),
    }
    words = [
        word
        for name, value in (given | arguments).items()
        for word in ([f"--{name}"] if value is None else [f"--{name}", value])
    ]
    command = [sys.executable, str(SCRIPTS / "train.py"), str(gpus), *words]
    cpu = {
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "DS_ACCELERATOR": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    env = trainer_runs.environment(SCRIPTS, CPU, packages, AUTOPROF="1", **cpu, **variables)
    return trainer_runs.run(command, folder, env, TIMEOUT_S)


@pytest.fixture(scope="module")
def grpo(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Run two steps of GRPO with two engines; the second is captured."""
    return train(tmp_path_factory.mktemp("openrlhf_grpo"), arguments={}, AUTOPROF_STEPS="2", AUTOPROF_RANKS="all")


# The trainer's timers and the stages that they surround. Stages of workers are parts of the driver's.
TIMERS = {
    "make_experience": ("make_experience", "compute_log_prob", "compute_ref_log_prob", "compute_advantage"),
    "ppo_train": ("update_actor",),
    "broadcast": ("update_weights",),
}
# The trainer's timers include a call of Ray's, which a stage of a worker does not.
CALL_S = 0.1


@pytest.mark.truth
def test_stages_take_the_seconds_that_the_trainer_logs(grpo: Ran, record_property: truth.Record) -> None:
    logged = re.findall(r"Global step (\d+): (\{.*?\})", grpo.output)
    rows = {row.number: row for row in truth.figures(grpo.run).steps}
    wrong = [] if len(logged) == 2 else [f"{len(logged)} steps in the log"]
    for number, line in logged:
        row = rows[int(number)]
        for timer, stages in TIMERS.items():
            (printed,) = re.findall(rf"'timing/{timer}': ([0-9.e+-]+)", line)
            got = sum(row.stages.get(stage, 0.0) for stage in stages)
            own = row.stages.get(OWN, 0.0) + (CALL_S if timer == "ppo_train" else 0.0)
            wrong += truth.second_differences(f"step {number} {timer}", got, float(printed), own)
    truth.row(record_property, "OpenRLHF GRPO", "OpenRLHF's timing/*", wrong)


@pytest.mark.truth
def test_a_healthy_training_has_no_finding(grpo: Ran, record_property: truth.Record) -> None:
    truth.row(record_property, "OpenRLHF GRPO", "no finding", truth.unconfirmed(truth.figures(grpo.run)))


STAGES = {
    "actor.compute_log_prob",
    "actor.update_actor",
    "actor.update_weights",
    "ref.compute_ref_log_prob",
    "trainer.compute_advantage",
}
NO_REFERENCE = STAGES - {"ref.compute_ref_log_prob"}


def engines(ran: Ran, step: int) -> dict[str, str]:
    """Return the state of each engine's captures in a step, by replica and part."""
    metas = [json.loads(path.read_text()) for path in ran.run.glob(f"global_step_{step:06d}/rollout.*.meta.json")]
    return {f"{meta['replica']}.{meta['part']}": meta["state"] for meta in metas}


def test_every_stage_of_the_chosen_step_is_captured(grpo: Ran) -> None:
    assert grpo.steps() == [2]
    assert {name for name in grpo.names(2) if not name.startswith("rollout.")} == STAGES


def test_both_engines_are_captured_in_the_step(grpo: Ran) -> None:
    recorded = engines(grpo, 2)
    assert set(recorded.values()) == {"complete"}
    assert recorded.keys() == {"0.rank0", "0.frontend", "1.rank0", "1.frontend"}


def worker_operators(ran: Ran, step: int, replica: int) -> set[str]:
    """Return the names of the events in the trace of an engine's only worker."""
    (path,) = ran.run.glob(f"global_step_{step:06d}/rollout.replica{replica}.rank*.pt.trace.json.gz")
    return {event["name"] for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]}


def test_an_engines_worker_records_its_forward_passes(grpo: Ran) -> None:
    for number in (0, 1):
        assert "aten::linear" in worker_operators(grpo, 2, number)


def test_the_engines_have_stopped_before_the_experience_is_made(grpo: Ran) -> None:
    stopped = [span["end_ns"] for span in grpo.spans("window")]
    (experience,) = [span for span in grpo.spans() if span["name"] == "make_experience" and span["step"] == 2]
    assert len(stopped) == 2
    assert max(stopped) <= experience["start_ns"]


def test_the_trace_of_the_update_has_the_backward_pass(grpo: Ran) -> None:
    assert "MmBackward0" in grpo.operators(2, "actor.update_actor")


def test_all_steps_and_their_stages_are_on_the_timeline(grpo: Ran) -> None:
    # The trainer requests samples once more after the last prompt.
    assert [span["step"] for span in grpo.spans("step")] == [1, 2, 3]
    for step in (1, 2):
        found = {(span["role"], span["name"]) for span in grpo.spans() if span["step"] == step}
        assert {tuple(stage.split(".")) for stage in STAGES} <= found
        assert {("rollout", "rollout"), ("trainer", "make_experience"), ("trainer", "update_weights")} <= found


def test_each_sample_has_a_span_of_its_reward(grpo: Ran) -> None:
    assert len(grpo.spans("reward")) == 16


def test_weights_reach_the_engines_after_the_update(grpo: Ran) -> None:
    (update,) = [span for span in grpo.spans() if span["name"] == "update_actor" and span["step"] == 2]
    (sync,) = [
        span
        for span in grpo.spans()
        if span["name"] == "update_weights" and span["step"] == 2 and span["role"] == "actor"
    ]
    assert update["end_ns"] <= sync["start_ns"]


ASYNCHRONOUS: dict[str, str | None] = {
    "train.async_enable": None,
    "vllm.num_engines": "1",
    "algo.kl.init_coef": "0",
    # Three steps. During the second one, the samples of the third are generated for a while.
    "data.max_samples": "12",
    "data.max_len": "256",
    "rollout.max_new_tokens": "192",
}


@pytest.fixture(scope="module")
def asynchronous(thorough: None, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Run three steps of the asynchronous trainer with one engine; the second is captured."""
    return train(tmp_path_factory.mktemp("openrlhf_async"), gpus=2, arguments=ASYNCHRONOUS, AUTOPROF_STEPS="2")


def test_the_asynchronous_trainers_step_is_captured(asynchronous: Ran) -> None:
    assert [span["step"] for span in asynchronous.spans("step")] == [1, 2, 3]
    assert {name for name in asynchronous.names(2) if not name.startswith("rollout.")} == NO_REFERENCE


def test_the_asynchronous_trainers_engine_is_captured(asynchronous: Ran) -> None:
    assert engines(asynchronous, 2) == {"0.rank0": "complete", "0.frontend": "complete"}
    assert "aten::linear" in worker_operators(asynchronous, 2, 0)


def test_asynchronous_generation_belongs_to_the_concurrent_step(asynchronous: Ran) -> None:
    generated = [span["step"] for span in asynchronous.spans() if span["name"] == "rollout"]
    # The first samples are generated before the first step.
    assert generated[0] is None
    assert set(generated[1:]) <= {1, 2, 3}


@pytest.fixture(scope="module")
def ppo(thorough: None, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Run two steps of PPO with a critic; the second is captured and saved."""
    return train(
        tmp_path_factory.mktemp("openrlhf_ppo"),
        gpus=3,
        arguments=PPO | {"critic.model_name_or_path": tiny_model()},
        AUTOPROF_STEPS="2",
    )


def test_the_critic_and_the_checkpoint_are_captured(ppo: Ran) -> None:
    further = {"critic.compute_values", "critic.update_critic", "critic.save_checkpoint", "actor.save_checkpoint"}
    assert {name for name in ppo.names(2) if not name.startswith("rollout.")} == NO_REFERENCE | further


def test_the_trace_of_the_critics_update_has_the_backward_pass(ppo: Ran) -> None:
    assert "MmBackward0" in ppo.operators(2, "critic.update_critic")


@pytest.fixture(scope="module")
def resumed(ppo: Ran, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Run two more steps from that checkpoint; the first is captured."""
    more = {"ckpt.load_enable": None, "ckpt.path": str(ppo.folder / "checkpoints"), "train.num_episodes": "2"}
    more |= {"critic.model_name_or_path": tiny_model()}
    return train(tmp_path_factory.mktemp("openrlhf_resumed"), gpus=3, arguments=PPO | more, AUTOPROF_STEPS="3")


def test_a_resumed_run_continues_the_step_numbers_of_openrlhf(resumed: Ran) -> None:
    assert resumed.steps() == [3]
    assert [span["step"] for span in resumed.spans("step")][:2] == [3, 4]


def test_the_engine_of_a_resumed_run_is_captured_once(resumed: Ran) -> None:
    assert len([span for span in resumed.spans() if span["name"] == "rollout" and span["step"] == 3]) == 2
    assert "aten::linear" in worker_operators(resumed, 3, 0)


def test_the_settings_that_remedies_name_exist() -> None:
    packages = trainer_runs.packages_of("openrlhf")
    (release,) = (
        path.name.removesuffix(".dist-info").partition("-")[2] for path in packages.glob("openrlhf-*.dist-info")
    )
    options = set(re.findall(r'"(--[^"]+)"', (packages / "openrlhf" / "cli" / "train_ppo_ray.py").read_text()))
    names = [name for topic in SETTINGS["openrlhf"] for name in setting_names("openrlhf", release, topic)]
    assert names
    assert set(names) <= options
