"""The machine, and the first important run: transformers' Trainer with and without autoprof."""

from __future__ import annotations

from collections.abc import Iterator

from bench.gpu.captures import spans
from bench.gpu.facts import Fact, Failed, row
from bench.gpu.workbench import Ran, Workbench

# Captured steps.
STEPS = "2,4"


def states(ran: Ran) -> dict[str, int]:
    """Return the number of captures by state."""
    found: dict[str, int] = {}
    for capture in ran.captures():
        found[capture.meta["state"]] = found.get(capture.meta["state"], 0) + 1
    return found


def complete(bench: Workbench, ran: Ran, steps: set[int]) -> Iterator[Fact]:
    """Yield facts: only these steps were captured, and all captures are complete."""
    yield chosen(bench, ran, steps)
    by_state = states(ran)
    yield bench.fact("every capture is complete", set(by_state) == {"complete"}, counted(by_state))


def chosen(bench: Workbench, ran: Ran, steps: set[int]) -> Fact:
    """Return the fact that only these steps were captured."""
    found = {capture.step for capture in ran.captures()}
    named = ", ".join(map(str, sorted(found)))
    return bench.fact("the chosen steps are captured, and no others", found == steps, f"steps {named}")


def counted(by_state: dict[str, int]) -> str:
    """Return the numbers of captures in words."""
    return ", ".join(f"{count} {state}" for state, count in by_state.items())


def kernels(bench: Workbench, ran: Ran, role: str = "") -> Iterator[Fact]:
    """Yield facts: the captures of a role have kernels, and the meta files agree."""
    captures = [capture for capture in ran.captures(role) if capture.path.exists()]
    counts = [len(capture.trace.kernels) for capture in captures]
    where = f" of {role}" if role else ""
    yield bench.on_gpu(f"kernels are in the traces{where}", all(counts) and counts, f"{sum(counts)} in {len(counts)}")
    said = [capture.meta.get("device_events") for capture in captures]
    agree = said == [
        count > 0 or len(capture.trace.copies) > 0 for capture, count in zip(captures, counts, strict=True)
    ]
    yield bench.on_gpu(f"the meta files{where} say whether GPU activity is there", agree, f"{said.count(True)} do")


@row(90)
def machine(bench: Workbench) -> Iterator[Fact]:
    """The device, and torch.profiler by hand: if it records no kernels, autoprof's traces have none either."""
    found = bench.program("machine", on=False).said
    bench.machine.update(found)
    yield bench.fact("nothing of autoprof is imported when it is off", not found["autoprof"])
    by_hand = found["by_hand"]
    yield bench.fact("torch.profiler by hand records operators", by_hand["operators"], by_hand["operators"])
    yield bench.on_gpu("torch.profiler by hand records kernels", by_hand["kernels"], by_hand["kernels"])
    yield bench.on_gpu("torch.profiler by hand records copies", by_hand["copies"], by_hand["copies"])


@row(120, modules=("transformers", "accelerate"))
def trainer(bench: Workbench) -> Iterator[Fact]:
    """transformers' Trainer, six steps, the second and fourth captured; the same without autoprof"""
    fixed = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    ran = bench.program("trainer", label="on", environment=fixed, steps=STEPS)
    yield from complete(bench, ran, {2, 4})
    stages = sorted({capture.stage for capture in ran.captures()})
    expected = ["trainer.optimizer_step", "trainer.training_step"]
    yield bench.fact("update and optimizer have a trace each", stages == expected, ", ".join(stages))
    steps = sorted(span["step"] for span in spans(ran.run))
    yield bench.fact("the timeline has all six steps", steps == [1, 2, 3, 4, 5, 6], f"{len(steps)} steps")
    yield from kernels(bench, ran, "trainer")
    yield from _device(bench, ran)
    off = bench.program("trainer", on=False, label="off", environment=fixed)
    yield bench.fact("nothing is imported or written without AUTOPROF", _nothing(off))
    same = off.said["history"] == ran.said["history"] and off.said["weights"] == ran.said["weights"]
    yield bench.fact("losses and weights are the same without autoprof", same, f"weights {ran.said['weights']}")


def _nothing(off: Ran) -> bool:
    return not off.said["autoprof"] and not list(off.folder.glob("autoprof_runs"))


def _device(bench: Workbench, ran: Ran) -> Iterator[Fact]:
    """Yield facts on device events in the updates."""
    updates = [capture.trace for capture in ran.captures("trainer.training_step")]
    if not updates:
        raise Failed("there is no trace of training_step")
    calls = [len(trace.runtime) for trace in updates]
    yield bench.on_gpu("calls of the runtime are in the traces", all(calls), sum(calls))
    parts = [trace.backward_and_forward() for trace in updates]
    backward, forward = sum(part[0] for part in parts), sum(part[1] for part in parts)
    yield bench.on_gpu("the forward pass launched kernels", all(part[1] for part in parts), forward)
    yield bench.on_gpu("the backward pass launched kernels", all(part[0] for part in parts), backward)
    operators = all(any("Backward" in name for name in trace.names("cpu_op")) for trace in updates)
    yield bench.fact("the backward pass has operators", operators)
