"""Trainers in their usual modes."""

from __future__ import annotations

from collections.abc import Iterator

from bench.gpu.facts import Fact, Skipped, row
from bench.gpu.rows.basics import STEPS, complete, kernels
from bench.gpu.workbench import Workbench

GRPO = {"rollout.generate", "reward.compute_reward", "actor.update_actor", "actor.optimizer_step"}


@row(100, modules=("transformers", "accelerate", "trl", "datasets"))
def grpo(bench: Workbench) -> Iterator[Fact]:
    """TRL's GRPO: rollout, rewards and update have separate traces"""
    ran = bench.program("grpo", steps=STEPS)
    yield from complete(bench, ran, {2, 4})
    stages = {capture.stage for capture in ran.captures()}
    yield bench.fact("each stage of GRPO has a trace", stages >= GRPO, ", ".join(sorted(stages)))
    for role in ("rollout.generate", "actor.update_actor"):
        yield from kernels(bench, ran, role)
    losses = [line["loss"] for line in ran.said["history"] if "loss" in line]
    yield bench.fact("all six steps are trained", ran.said["steps"] == len(losses) == 6, f"{len(losses)} losses")


@row(60, modules=("transformers", "accelerate"))
def mixed(bench: Workbench) -> Iterator[Fact]:
    """The Trainer in bf16 with gradient checkpointing"""
    if bench.gpu and not bench.machine.get("hip") and float(bench.machine["capability"]) < 8:
        raise Skipped(f"bf16 takes a device of capability 8.0; this one has {bench.machine['capability']}")
    ran = bench.program("trainer", "--variant", "mixed", steps=STEPS)
    yield from complete(bench, ran, {2, 4})
    yield from kernels(bench, ran, "trainer")
    again = [capture.trace.recomputed() for capture in ran.captures("trainer.training_step")]
    yield bench.fact("layers are computed again in the backward pass", all(again), sum(again))


@row(100, modules=("transformers", "accelerate"))
def compiled(bench: Workbench) -> Iterator[Fact]:
    """The Trainer with torch.compile"""
    if bench.gpu and bench.lacks("triton"):
        raise Skipped("not installed: triton")
    ran = bench.program("trainer", "--variant", "compiled", steps=STEPS)
    yield from complete(bench, ran, {2, 4})
    yield from kernels(bench, ran, "trainer")
    traces = [capture.trace for capture in ran.captures("trainer.training_step")]
    names = {name for trace in traces for name in trace.names("cpu_op") | trace.names("user_annotation")}
    regions = sorted(name for name in names if name.startswith(("Torch-Compiled Region", "CompiledFunction")))
    yield bench.fact("compiled code ran", regions, ", ".join(regions[:3]))
    made = {kernel.name for trace in traces for kernel in trace.kernels if kernel.name.startswith("triton_")}
    yield bench.on_gpu("kernels of Triton's are in the traces", made, len(made))
