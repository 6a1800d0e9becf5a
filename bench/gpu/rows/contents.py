"""Contents of traces: sums, stacks, shapes, memory, flops, whole steps, CUDA graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from bench.gpu.captures import Trace
from bench.gpu.facts import Fact, row
from bench.gpu.rows.basics import STEPS, complete, kernels
from bench.gpu.workbench import Workbench

# torch's device type of CUDA, and of HIP if torch does not call it CUDA.
_GPU_TYPES = {1, 6}


@row(60)
def sums(bench: Workbench) -> Iterator[Fact]:
    """autoprof's sums of a trace compared with torch's own key_averages, and the same work recorded by both"""
    ran = bench.program("sums", steps="1")
    said = ran.said
    ours, theirs = said["calls"]
    yield bench.fact(
        "torch names everything that autoprof sums up", said["names"] and not said["missing"], said["names"]
    )
    # If an operator only calls itself, torch counts one call.
    equal = not said["unequal"] if bench.gpu else ours >= theirs
    yield bench.fact("calls are equal by name", equal, f"{ours} and {theirs}")
    mine, torchs = said["own_us"]
    # For the host, both compute own times from rounded starts.
    close = abs(mine - torchs) <= (0.001 if bench.gpu else 0.02) * torchs
    yield bench.fact("own times are equal", close, f"{mine:.0f} and {torchs:.0f} µs")
    (capture,) = ran.captures()
    wanted = ("kernel", "gpu_memcpy", "gpu_memset") if bench.gpu else ("cpu_op",)
    both = [
        Counter(event.name for event in trace.of(wanted)) for trace in (capture.trace, Trace(Path(said["by_hand"])))
    ]
    yield bench.fact(
        "autoprof's capture has what torch.profiler by hand has",
        both[0] == both[1],
        f"{both[0].total()} and {both[1].total()}",
    )


@row(60)
def contents(bench: Workbench) -> Iterator[Fact]:
    """Stacks, shapes, memory and flops in one trace"""
    asked = "cpu,cuda,stack,shapes,memory,flops" if bench.gpu else "cpu,stack,shapes,memory,flops"
    ran = bench.program("loop", steps=STEPS, contents=asked)
    yield from complete(bench, ran, {2, 4})
    capture = ran.captures()[0]
    yield bench.fact("nothing is left out", not capture.meta["left_out"], ",".join(capture.meta["contents"]))
    trace = capture.trace
    python = trace.of(["python_function"])
    yield bench.fact("stacks: Python's calls are there", python, len(python))
    yield bench.fact("shapes: operators have their inputs' sizes", trace.shaped(), trace.shaped())
    types = trace.allocations()
    yield bench.fact("memory: allocations are there", types, f"device types {sorted(types)}")
    yield bench.on_gpu(
        "memory: allocations of the device are there", types & _GPU_TYPES, f"device types {sorted(types)}"
    )
    yield bench.on_gpu("copies to the device are there", trace.copies, len(trace.copies))
    yield bench.fact("flops: torch counted them", trace.whole.get("with_flops"))
    yield from kernels(bench, ran)


@row(60)
def whole_steps(bench: Workbench) -> Iterator[Fact]:
    """One trace for each whole step, in continuous mode"""
    ran = bench.program("loop", "--steps", "4", steps="2:4", mode="continuous")
    yield from complete(bench, ran, {2, 3})
    names = [capture.stage for capture in ran.captures()]
    yield bench.fact("each step has one trace", names == ["actor.step"] * 2, ", ".join(names))
    yield from kernels(bench, ran)


@row(60, gpu=True)
def graphs(bench: Workbench) -> Iterator[Fact]:
    """CUDA graphs that are replayed in a captured stage"""
    ran = bench.program("loop", "--graph", "1", steps=STEPS)
    yield from complete(bench, ran, {2, 4})
    replays = ran.captures("rollout.replay")
    counts = [len(capture.trace.kernels) for capture in replays]
    yield bench.on_gpu("the kernels of the graph are in the trace", min(counts) >= 40, counts)
    launches = {event.name for capture in replays for event in capture.trace.runtime if "Graph" in event.name}
    yield bench.on_gpu("the launches of the graph are in the trace", launches, ", ".join(sorted(launches)))
    yield bench.on_gpu("the graph computes what it should", ran.said["graph"] == 1.0, ran.said["graph"])
