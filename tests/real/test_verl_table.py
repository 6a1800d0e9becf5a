"""What the settings ask for is what the traces hold: real PPO runs of verl 0.9.1 with a critic and a reference on two
workers, discrete and continuous."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest
from verl_runs import VerlRun

# What each worker does in a step, in this order in V1.
WORK = {
    "actor.compute_log_prob",
    "ref.compute_ref_log_prob",
    "critic.compute_values",
    "critic.update_critic",
    "actor.update_actor",
    "actor.update_weights",
}


def metas(run: VerlRun, step: int) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(run.step_folder(step).glob("*.meta.json"))]


def ranks(run: VerlRun, step: int) -> dict[str, list[int]]:
    """The ranks of each role's stages, and of each part of the rollout."""
    found: dict[str, list[int]] = defaultdict(list)
    for meta in metas(run, step):
        if meta["role"] == "rollout":
            found[f"rollout {meta['part']}"].append(meta["rank"])
        else:
            found[f"{meta['role']}.{meta['stage']}"].append(meta["rank"])
    return {name: sorted(found[name]) for name in sorted(found)}


def events(trace: dict[str, Any], category: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event.get("cat") == category]


def holds(trace: dict[str, Any]) -> set[str]:
    """Which of the contents show in a trace."""
    operators = events(trace, "cpu_op")
    found = {"cpu"} if operators else set()
    if events(trace, "python_function"):
        found.add("stack")
    if any("Input Dims" in event.get("args", {}) for event in operators):
        found.add("shapes")
    if any(event["name"] == "[memory]" for event in trace["traceEvents"]):
        found.add("memory")
    if any(event["name"].startswith("nn.Module: ") for event in trace["traceEvents"]):
        found.add("module")
    return found


def ranges(trace: dict[str, Any]) -> list[str]:
    """autoprof's ranges in a trace, from outer to inner and first to last."""
    found = [event for event in events(trace, "user_annotation") if event["name"].startswith(("global_step", *ROLES))]
    return [event["name"] for event in sorted(found, key=lambda event: (event["ts"], -event["dur"]))]


ROLES = ("trainer.", "actor.", "critic.", "ref.", "mini_batch ")


@pytest.mark.parametrize("name", ["critic", "continuous"])
def test_print(name, request) -> None:
    run = request.getfixturevalue(name)
    if 1:
        for step in range(2, 8):
            if not run.step_folder(step).exists():
                print(step, "NONE")
                continue
            print("STEP", step, ranks(run, step) if run.step_folder(step).exists() else None)
            for meta in metas(run, step):
                print(
                    "   ",
                    meta["role"],
                    meta["stage"],
                    meta["rank"],
                    meta["part"],
                    meta["tool"],
                    meta["contents"],
                    meta["state"],
                    meta["reason"],
                    meta["bytes"],
                    meta.get("steps"),
                )
            for path in sorted(run.step_folder(step).glob("*.gz")):
                trace = run.trace(step, path.name.removesuffix(".pt.trace.json.gz"))
                print(
                    "   ",
                    path.name[:50],
                    holds(trace),
                    ranges(trace),
                    trace.get("with_modules"),
                    trace.get("distributedInfo", {}).get("rank"),
                )
    assert 0
