"""What is sent to SGLang's profiler: from the settings and from what this SGLang takes. Nothing here touches an engine.

SGLang answers some requests by ending the server: by-stage without a count, an activity that its torch lacks (seen with
0.5.8 and 0.5.23). Those never leave this module.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
from typing import Any, NamedTuple

import msgspec

from autoprof.settings import MERGE
from autoprof.tools.torch import DEVICES, profile_arguments
from autoprof.window import parse_iterations

# The name under which the meta file says that the recorded forward passes are not those of the setting.
ITERATIONS = "rollout-iterations"
# SGLang's own merge, in the server. Autoprof's is made after the recording, for every engine.
ENGINES_MERGE = "sglang-merge-profiles"


class Takes(msgspec.Struct, frozen=True, kw_only=True):
    """What this SGLang takes.

    Attributes:
        arguments: The names that its `start_profile` takes.
        devices: The words of `AUTOPROF_CONTENTS` for what its torch can record.
        memory: Whether there is CUDA's memory history to be had.
        stack: Whether stacks can be recorded without flooding the trace.
        one_node: Whether the whole replica is on this node.
        disaggregated: Whether prefill and decode are in servers of their own.
    """

    arguments: frozenset[str]
    devices: tuple[str, ...] = ("cpu",)
    memory: bool = False
    stack: bool = False
    one_node: bool = True
    disaggregated: bool = False


class Plan(NamedTuple):
    """What is sent, the words of `AUTOPROF_CONTENTS` that it records, and why each of the others is left out."""

    arguments: dict[str, Any]
    contents: list[str]
    left_out: dict[str, str]


def probe(tokenizer_manager: Any) -> Takes:
    """Find out what the SGLang of a `TokenizerManager` takes."""
    import torch

    parameters = inspect.signature(tokenizer_manager.start_profile).parameters
    request = request_type() if "req" in parameters else None
    server = tokenizer_manager.server_args
    return Takes(
        arguments=frozenset(parameters if request is None else fields_of(request)),
        devices=tuple(profile_arguments(())[1]),
        memory=torch.version.cuda is not None and getattr(server, "device", "") == "cuda",
        # An idle scheduler polls, and Python's tracer records every turn: after 1 s idle a stop took over a minute
        # (0.5.8). The option is there from 0.4.9 on.
        stack=bool(getattr(server, "sleep_on_idle", False)) and not _switched_off("SGLANG_PROFILE_WITH_STACK"),
        one_node=getattr(server, "nnodes", 1) == 1,
        disaggregated=getattr(server, "disaggregation_mode", "null") not in ("null", None),
    )


def request_type() -> type:
    """SGLang's `ProfileReq`, the one argument of `start_profile` from 0.5.15 on."""
    from sglang.srt.managers.io_struct import ProfileReq

    kind: type = ProfileReq
    return kind


def fields_of(kind: type) -> list[str]:
    """The fields of a dataclass, or of a msgspec struct, which `ProfileReq` is from 0.5.15 on."""
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind)]
    return [field.name for field in msgspec.structs.fields(kind)]


def plan(contents: tuple[str, ...], iterations: str, takes: Takes) -> Plan:
    """Choose the arguments of `start_profile`, but for `output_dir`.

    Args:
        contents: `AUTOPROF_CONTENTS`.
        iterations: `AUTOPROF_ROLLOUT_ITERATIONS`.
        takes: What this SGLang takes.
    """
    left_out: dict[str, str] = {}
    devices = [word for word in contents if word in DEVICES and word in takes.devices]
    if not devices:
        devices = ["cpu"] if any(word in DEVICES for word in contents) else list(takes.devices)
    # SGLang names every accelerator GPU, NPUs too (0.5.23, scheduler_components/profiler_manager.py).
    activities = ["CPU"] if "cpu" in devices else []
    if any(word != "cpu" for word in devices):
        activities.append("GPU")
    used = list(devices)
    for word in contents:
        if word in DEVICES and word not in devices:
            left_out[word] = "this torch can't record it"
    if "memory" in contents:
        if takes.memory:
            activities.append("MEM")
            used.append("memory")
        else:
            left_out["memory"] = "there is no CUDA memory history here"
    arguments: dict[str, Any] = {"activities": activities}
    # Both are on in SGLang where nothing is said.
    for word, name in (("stack", "with_stack"), ("shapes", "record_shapes")):
        arguments[name] = word in contents
    if "stack" in contents and not takes.stack:
        arguments["with_stack"] = False
        left_out["stack"] = "an idle SGLang floods the trace with stacks; start it with --sleep-on-idle"
    if "shapes" in contents and _switched_off("SGLANG_PROFILE_RECORD_SHAPES"):
        arguments["record_shapes"] = False
        left_out["shapes"] = "SGLANG_PROFILE_RECORD_SHAPES is off"
    used += [word for word, name in (("stack", "with_stack"), ("shapes", "record_shapes")) if arguments[name]]
    for word in ("flops", "module"):
        if word in contents:
            left_out[word] = "SGLang has no such setting"
    if MERGE in contents:
        used.append(MERGE)
    if ENGINES_MERGE in contents:
        if why := _no_merge(takes):
            left_out[ENGINES_MERGE] = why
        else:
            arguments["merge_profiles"] = True
            used.append(ENGINES_MERGE)
    arguments |= _passes("profile-by-stage" in contents, iterations, takes, left_out)
    if arguments.get("profile_by_stage"):
        used.append("profile-by-stage")
    return Plan({name: value for name, value in arguments.items() if name in takes.arguments}, used, left_out)


def _passes(by_stage: bool, iterations: str, takes: Takes, left_out: dict[str, str]) -> dict[str, Any]:
    """The arguments that say which forward passes are recorded.

    `start_step` is a number of the scheduler's own count. What is sent counts from the start of the capture, and
    autoprof's hook in the scheduler (`sglang_scheduler.py`) adds that count. With it SGLang records exactly `num_steps`
    passes in every version; without it one less up to 0.5.15 (`num_steps` counts the pass before the first there).
    """
    first, stop = parse_iterations(iterations)
    if by_stage:
        why = _no_stages(first, stop, takes)
        if not why:
            return {"profile_by_stage": True, "num_steps": stop}
        left_out["profile-by-stage"] = why
    if stop is None:
        return {}
    if "start_step" in takes.arguments and takes.one_node:
        return {"start_step": first + 1, "num_steps": stop - first}
    if "profile_by_stage" in takes.arguments:
        # One more than asked for, rather than one less. What is armed must be disarmed on every node, by a hook that
        # other nodes may lack; a recording that begins at once needs none.
        left_out[ITERATIONS] = f"SGLang begins at once here; up to {stop + 1} passes are recorded"
        return {"num_steps": stop + 1}
    # 0.4.6 answers a start with a count when the count is over (managers/scheduler.py), which could be never.
    left_out[ITERATIONS] = "this SGLang can't count passes; all are recorded"
    return {}


def _no_stages(first: int, stop: int | None, takes: Takes) -> str:
    if "profile_by_stage" not in takes.arguments:
        return "this SGLang does not know stages"
    if stop is None:
        return "without an end in AUTOPROF_ROLLOUT_ITERATIONS it ends the server"
    if first:
        return "SGLang's stages can't begin later than the capture"
    if not takes.one_node:
        return "the replica is on several nodes"
    if takes.disaggregated:
        return "prefill and decode are in servers of their own"
    return ""


def _no_merge(takes: Takes) -> str:
    """Why SGLang does not merge. It finds the traces by the beginning of their names: no prefix may be sent with it."""
    if "merge_profiles" not in takes.arguments:
        return "this SGLang merges nothing"
    return "" if takes.one_node else "the replica is on several nodes"


def _switched_off(variable: str) -> bool:
    """Whether a variable of SGLang's own switches something off (0.5.23, tokenizer_control_mixin.py)."""
    return os.environ.get(variable, "true").lower() not in ("true", "1")
