"""Remedies: for each kind of finding, what to do, the trainer's settings for it, and a command to copy."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, TypeAlias

import msgspec
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from autoprof.config import settings
from autoprof.config.values import PREFIX, SettingsError
from autoprof.report.findings import findings_of_loops
from autoprof.report.model import Finding, RunFigures, listed
from autoprof.rundir.runs import Run


class Advised(NamedTuple):
    """The run that remedies are for.

    Attributes:
        name: The name of the run, as a word of a shell.
        going_on: True if the run is running.
        captured: The numbers of the captured steps.
        captured_ranks: For each captured rank of the steps in detail, the number of the step and the rank.
        timed: The numbers of the steps in the timeline.
        trainer: The trainer: a key of `SETTINGS`. Empty if the settings of the trainer are unknown.
        version: The version of the trainer.
        loop: The number of the loop of the steps. 0 if the run has only one loop.
    """

    name: str
    going_on: bool
    captured: frozenset[int] = frozenset()
    captured_ranks: frozenset[tuple[int | None, int]] = frozenset()
    timed: frozenset[int] = frozenset()
    trainer: str = ""
    version: str = ""
    loop: int = 0


# Function that returns the command for a finding, or an empty text.
Command: TypeAlias = Callable[[Advised, Finding], str]


def look(run: Advised, finding: Finding) -> str:
    """Return the command that shows the step of the finding: with its trace if the step was captured."""
    if finding.step is None:
        return f"autoprof open {run.name}"
    step = f"{run.name} --step {finding.step}" + (f" --loop {run.loop}" if run.loop else "")
    if finding.step in run.captured:
        return f"autoprof open {step}"
    return f"autoprof report {step}" if finding.step in run.timed else ""


def examine(run: Advised, finding: Finding) -> str:
    """Return the command that lists the problems of the run."""
    return f"autoprof doctor {run.name}"


def show_stacks(run: Advised, finding: Finding) -> str:
    """Return the command that shows where the processes are. Doctor knows where they were in a step that has ended."""
    is_over = not run.going_on or finding.is_past
    return examine(run, finding) if is_over else f"autoprof stacks {run.name}"


def watch(run: Advised, finding: Finding) -> str:
    """Return the command that shows where the processes are. In a run that has ended, show the step instead."""
    return f"autoprof stacks {run.name}" if run.going_on else look(run, finding)


def capture(**chosen: str) -> Command:
    """Return a function that returns the command to get a trace of such a step.

    A trace that exists is shown, and a running run captures its next step. Otherwise the command sets `AUTOPROF_*` for
    the next run.

    Args:
        chosen: The values of the settings for the next run, by the names of the settings.
    """

    def command(run: Advised, finding: Finding) -> str:
        if finding.step in run.captured:
            return look(run, finding)
        return _capture_next(run, chosen)

    return command


_SLOW_RANK = re.compile(r" rank (\d+) was slow in ")


def capture_rank(run: Advised, finding: Finding) -> str:
    """Return the command to get traces of the slow rank of the finding, and of another rank to compare it with."""
    match = _SLOW_RANK.search(finding.text)
    rank = int(match[1]) if match else 0
    if (finding.step, rank) in run.captured_ranks:
        return look(run, finding)
    return _capture_next(run, {"when": "rank>1.2x", "ranks": f"0,{rank or 1}"})


def capture_slowest(run: Advised, finding: Finding) -> str:
    """Return the command to get traces of the slowest replicas."""
    return _capture_next(run, {"when": "replica>1.3x", "ranks": "slowest:2"})


def _capture_next(run: Advised, chosen: Mapping[str, str]) -> str:
    if run.going_on:
        options = "".join(f" --{name} {shlex.quote(value)}" for name, value in chosen.items() if name != "when")
        return f"autoprof trigger {run.name}{options}"
    return "export " + " ".join(f"{PREFIX}{name.upper()}={shlex.quote(value)}" for name, value in chosen.items())


class Remedy(NamedTuple):
    """The remedy for one kind of finding.

    Attributes:
        advice: A sentence without a full stop.
        command: Function that returns the command.
        topics: The topics of the trainer's settings that help: keys of `SETTINGS`.
        with_trace: The sentence for a step that was captured. If empty, `advice`.
    """

    advice: str
    command: Command
    topics: tuple[str, ...] = ()
    with_trace: str = ""


_TERMINATED = " was killed by SIGTERM"
_LOOK = "Look at the trace of this step"
# The remedy for each kind of finding in `rules.KINDS`, and for the findings of comparisons.
REMEDIES = {
    "death": Remedy("Fix the first error; the processes after it are its victims", examine),
    "hang": Remedy("Look at the stacks of the processes for which the others wait", show_stacks),
    "failed_samples": Remedy("Catch the exception in the tool, the reward or the agent loop", examine),
    "slow_tool": Remedy("Set a timeout for the tool", look),
    "slow_reward": Remedy("Compute rewards during generation, and several at a time", look, ("rewards",)),
    "sample_tail": Remedy("Limit the length of answers", look, ("answer length",)),
    "tool_time": Remedy("Run tool calls in parallel, or make the tools faster", look, ("tool calls",)),
    "slow_rank": Remedy(
        "Compare the batch and the host of this rank with the other ranks",
        capture_rank,
        ("balance",),
    ),
    "slow_replica": Remedy(
        "Compare the requests and the host of this replica with the other replicas",
        capture_slowest,
    ),
    "weight_sync": Remedy(
        "Capture the step after the next slow weight sync", capture(when="weight_sync>2x"), with_trace=_LOOK
    ),
    "weight_sync_share": Remedy("Send weights in larger pieces, or less often", look, ("weight sync",)),
    "idle_gap": Remedy("Move this work of the driver to the workers, or do it while they work", look),
    "no_stage": Remedy("Make this part of the loop faster, or name it with a `stage` hook", watch),
    "checkpoint": Remedy("Save less often", look, ("checkpoint",)),
    "validation": Remedy("Validate less often, or with fewer samples", look, ("validation",)),
    "growth": Remedy("Compare an early step with a late one; look for a list, a log or a cache that grows", look),
    "slow_step": Remedy("Capture the step after the next slow one", capture(when="step>1.2x"), with_trace=_LOOK),
    "cpu_bound": Remedy("Use CUDA graphs or larger batches", look, ("CUDA graphs", "batch")),
    "device_idle": Remedy("Give the device more work at a time", look, ("requests",)),
    "communication": Remedy("Overlap communication with computing, or shard over fewer devices", look, ("overlap",)),
    "memory": Remedy(
        "Use less memory before it runs out; a memory history shows its owners",
        lambda run, finding: _capture_next(run, {"tool": "memory"}),
        ("memory", "batch"),
    ),
    "bad_capture": Remedy("Remove the cause that doctor names, and capture again", examine),
    "slower_stage": Remedy("Capture this stage in both runs; then the report compares its operators", look),
    "slower_operator": Remedy("Compare the shapes and the number of its calls in both traces", look),
    "slower_step": Remedy("Begin with the stage that became slower the most", look),
    "fewer_tokens": Remedy("Compare the lengths of answers first, then the time of generation", look),
}


class Setting(NamedTuple):
    """A setting of a trainer, and the releases that have it. If `releases` is empty, all releases have it."""

    name: str
    releases: str = ""


# Settings of each trainer by topic. The names come from the sources of the releases: verl 0.5 to 0.9
# (trainer/config/_generated_ppo_trainer.yaml), TRL 0.17 to 1.16 (GRPOConfig), OpenRLHF 0.9.9 to 0.11
# (cli/train_ppo_ray.py).
SETTINGS: dict[str, dict[str, tuple[Setting, ...]]] = {
    "verl": {
        "rewards": (
            Setting("reward.num_workers", ">=0.8"),
            Setting("reward_model.launch_reward_fn_async", "<0.8"),
        ),
        "answer length": (Setting("data.max_response_length"),),
        "tool calls": (Setting("actor_rollout_ref.rollout.multi_turn.max_parallel_calls"),),
        "balance": (Setting("trainer.balance_batch"),),
        "weight sync": (
            Setting("actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes", ">=0.8"),
            Setting("actor_rollout_ref.rollout.update_weights_bucket_megabytes", "<0.8"),
        ),
        "checkpoint": (Setting("trainer.save_freq"),),
        "validation": (Setting("trainer.test_freq"), Setting("data.val_max_samples", ">=0.6.1")),
        "CUDA graphs": (Setting("actor_rollout_ref.rollout.enforce_eager"),),
        "batch": (Setting("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"),),
        "requests": (Setting("actor_rollout_ref.rollout.max_num_seqs"),),
        "memory": (Setting("actor_rollout_ref.rollout.gpu_memory_utilization"),),
    },
    "openrlhf": {
        "answer length": (Setting("--rollout.max_new_tokens", ">=0.11"), Setting("--max_new_tokens", "<0.11")),
        "balance": (Setting("--train.dynamic_batch_enable", ">=0.11"), Setting("--use_dynamic_batch", "<0.11")),
        "weight sync": (Setting("--vllm.sync_backend", ">=0.11"), Setting("--vllm_sync_backend", "<0.11")),
        "checkpoint": (Setting("--ckpt.save_steps", ">=0.11"), Setting("--save_steps", "<0.11")),
        "validation": (Setting("--eval.steps", ">=0.11"), Setting("--eval_steps", "<0.11")),
        "CUDA graphs": (Setting("--vllm.enforce_eager", ">=0.11"), Setting("--enforce_eager", "<0.11")),
        "batch": (Setting("--train.micro_batch_size", ">=0.11"), Setting("--micro_train_batch_size", "<0.11")),
        "overlap": (Setting("--ds.overlap_comm", ">=0.11"), Setting("--overlap_comm", "<0.11")),
        "memory": (
            Setting("--vllm.gpu_memory_utilization", ">=0.11"),
            Setting("--vllm_gpu_memory_utilization", "<0.11"),
        ),
    },
    "trl": {
        "answer length": (Setting("max_completion_length"),),
        "weight sync": (Setting("steps_per_generation", ">=0.20"),),
        "checkpoint": (Setting("save_steps"),),
        "validation": (Setting("eval_steps"),),
        "batch": (Setting("per_device_train_batch_size"),),
        "memory": (Setting("vllm_gpu_memory_utilization"),),
    },
}
# Modules of the trainers' packages whose settings have other names. If one of them runs, no setting is named.
_OTHER_PROGRAMS = ("sft_trainer", "fully_async", "train_sft", "train_dpo", "train_rm")


def with_remedies(figures: RunFigures, run: Run) -> RunFigures:
    """Return the same figures with the remedy and the command of each finding."""
    captured = frozenset(row.number for row in figures.steps if row.captured)
    captured |= {step.number for step in figures.details if step.captures}
    ranks = frozenset(
        (step.number, each.rank) for step in figures.details for each in step.captures if each.rank is not None
    )
    timed = frozenset(row.number for row in figures.steps)
    trainer = _trainer(figures.versions, figures.command)
    advised = Advised(name_of(run.path), figures.going_on, captured, ranks, timed, *trainer, figures.loop)
    comparison = figures.comparison
    if comparison is not None:
        comparison = msgspec.structs.replace(comparison, findings=remedied(comparison.findings, advised))
    details = [msgspec.structs.replace(step, findings=remedied(step.findings, advised)) for step in figures.details]
    loops = [with_remedies(part, run) for part in figures.loops]
    findings = findings_of_loops(loops) if loops else remedied(figures.findings, advised)
    return msgspec.structs.replace(figures, findings=findings, details=details, comparison=comparison, loops=loops)


def remedied(findings: Iterable[Finding], run: Advised) -> list[Finding]:
    """Return the findings with their remedies and commands."""
    return [_with_remedy(finding, run) for finding in findings]


def name_of(run: str) -> str:
    """Return the word that names a run in a command: its id, or its path if the run is not in the folder of runs.

    Args:
        run: The path of the run.
    """
    folder = None
    try:
        folder = settings.load_one("dir", os.environ, Path.cwd())
    except (SettingsError, OSError):
        pass
    path = Path(run).resolve()
    in_folder = folder is not None and Path(folder, path.name).resolve() == path
    return shlex.quote(path.name if in_folder else str(path))


def setting_names(trainer: str, version: str, topic: str) -> list[str]:
    """Return the names of a trainer's settings for a topic, in one of its releases."""
    try:
        release = Version(Version(version).base_version)
    except InvalidVersion:
        return []
    found = SETTINGS.get(trainer, {}).get(topic, ())
    return [setting.name for setting in found if SpecifierSet(setting.releases).contains(release)]


def _trainer(versions: Mapping[str, str], command: str) -> tuple[str, str]:
    """Return the trainer of a run and its version. If its settings are unknown, return empty texts."""
    if any(program in command for program in _OTHER_PROGRAMS):
        return "", ""
    return next(((name, versions[name]) for name in SETTINGS if name in versions), ("", ""))


def _with_remedy(finding: Finding, run: Advised) -> Finding:
    advice, command, topics, with_trace = REMEDIES[finding.kind]
    advice = with_trace if with_trace and finding.step in run.captured else advice
    if finding.kind == "death" and _TERMINATED in finding.text:
        advice = "Find the sender of SIGTERM in the logs: a launcher, a scheduler at its time limit, or a user"
    names = [name for topic in topics for name in setting_names(run.trainer, run.version, topic)]
    named_settings = f" Settings of {run.trainer} {run.version}: {listed(names)}." if names else ""
    return msgspec.structs.replace(finding, remedy=f"{advice}.{named_settings}", command=command(run, finding))
