"""CUDA's memory: the allocator's history, an allocation that fails, a device that fills."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator

from bench.gpu.captures import META, Capture
from bench.gpu.facts import SKIPPED, Fact, row
from bench.gpu.workbench import Ran, Workbench


@row(90)
def memory(bench: Workbench) -> Iterator[Fact]:
    """The memory history, a planted out-of-memory error and a device that is more than half full"""
    # On the CPU, the condition uses the host's memory, of which at least a hundredth is always in use.
    share = "0.5" if bench.gpu else "0.001"
    tool = "torch,memory" if bench.gpu else "torch"
    ran = bench.program("memory", steps="2", when=f"oom, memory>{share}", tool=tool, memory="oom=true")
    yield bench.fact("the run goes on after an allocation that fails", ran.said["failed"] == 1)
    captures = ran.captures()
    windows = {capture.step: capture.meta["window"] for capture in captures}
    after = windows.get(4, "")
    yield bench.fact("the step after it is captured", "oom" in after, after or f"captured: {windows}")
    filled = next((f"step {step}: {window}" for step, window in windows.items() if "memory>" in window), "")
    if ran.said["filled"]:
        yield Fact("the step after the device fills is captured", SKIPPED, f"it is in use: {ran.said['filled'][:120]}")
    else:
        yield bench.fact("the step after the device fills is captured", filled, filled or f"captured: {windows}")
    if not bench.gpu:
        yield Fact("the allocator's history", SKIPPED, "the CPU's allocator keeps none")
        return
    yield from _history(bench, captures)
    yield from _snapshot(bench, ran)


def _history(bench: Workbench, captures: list[Capture]) -> Iterator[Fact]:
    found = [capture.snapshot for capture in captures if capture.step == 2 and capture.snapshot.exists()]
    yield bench.fact("the captured step has a memory snapshot", found, len(found))
    for path in found[:1]:
        said = pickle.loads(path.read_bytes())
        events = sum(map(len, said["device_traces"]))
        framed = sum(bool(event.get("frames")) for trace in said["device_traces"] for event in trace)
        yield bench.fact(
            "the snapshot has allocations with stacks", events and framed, f"{events}, {framed} with stacks"
        )
        yield bench.fact("the snapshot names its step", said.get("autoprof", {}).get("global_step") == 2)


def _snapshot(bench: Workbench, ran: Ran) -> Iterator[Fact]:
    found = sorted((ran.run / "oom").glob(f"*{META}"))
    metas = [json.loads(path.read_text()) for path in found]
    asked = [meta["asked_bytes"] for meta in metas]
    total = [meta["total_bytes"] for meta in metas]
    said = f"asked for {asked[0] / 1e9:.1f} GB of {total[0] / 1e9:.1f}" if metas else "there is none"
    yield bench.fact("the failed allocation left a snapshot", metas and asked[0] > total[0], said)
