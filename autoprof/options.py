"""What each tool can be told besides the contents: `AUTOPROF_NPU="level=level2,mstx=false"`, or a table `[npu]`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec


class NpuOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """torch_npu's profiler, in the words of its `_ExperimentalConfig` (torch_npu 2.5.1 to 2.14.0).

    Attributes:
        level: How much is collected from the device.
        aic_metrics: What is counted in AI cores; `none` where the level is `level_none` or `level0`, unless it is said.
        export: What the analysis makes: text, which Perfetto opens, databases for MindStudio Insight, or both.
        mstx: Whether ranges that frameworks mark are recorded, but for those of communication.
        l2_cache: Whether the hits of the L2 cache are counted.
        op_attr: Whether operators' attributes are collected.
        analyse: Whether another process has torch_npu analyse what was recorded, right after it; without it `autoprof
            analyse` does, at any time.
    """

    level: Literal["level_none", "level0", "level1", "level2"] = "level1"
    aic_metrics: Literal[
        "pipe_utilization",
        "arithmetic_utilization",
        "memory",
        "memory_l0",
        "memory_ub",
        "memory_access",
        "resource_conflict_ratio",
        "l2_cache",
        "none",
    ] = "pipe_utilization"
    export: Literal["text", "db", "both"] = "text"
    mstx: bool = True
    l2_cache: bool = False
    op_attr: bool = False
    analyse: bool = True


class NsysOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Nsight Systems.

    Attributes:
        trace: What `nsys profile --trace` takes, its parts divided by `+`.
        sample: What `nsys profile --sample` takes: `none`, or `process-tree` for samples of the host's stacks.
        python_backtrace: Whether CUDA calls hold the Python stack (`--python-backtrace=cuda`).
        gpu_metrics: The devices whose hardware counters are sampled (`--gpu-metrics-devices`), their numbers divided by
            `+`; `all`, or `none`.
        executable: The `nsys` that is taken; by default the first on the path.
    """

    trace: str = "cuda+nvtx+osrt+cublas+cudnn"
    sample: Literal["none", "process-tree"] = "none"
    python_backtrace: bool = False
    gpu_metrics: str = "none"
    executable: str = "nsys"


class MemoryOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The history of CUDA's caching allocator (torch.cuda.memory).

    Attributes:
        max_entries: How many allocations and frees are kept, the last ones.
        stacks: Whose stacks are kept with them: Python's, C++'s as well, or none.
        oom: Whether the state of the allocator is kept when it runs out of memory, in every step.
    """

    max_entries: int = 100_000
    stacks: Literal["python", "all", "none"] = "python"
    oom: bool = False


KINDS: dict[str, type[msgspec.Struct]] = {"npu": NpuOptions, "nsys": NsysOptions, "memory": MemoryOptions}


def parse(kind: type[msgspec.Struct], text: object) -> msgspec.Struct:
    """Read the options of a tool, from a table or from text such as `level=level2,mstx=false`.

    Raises:
        ValueError: One is unknown or has a wrong value; the message says which.
    """
    if isinstance(text, str):
        pairs = [pair.partition("=") for pair in text.split(",") if pair.strip()]
        if unclear := [name for name, equals, _ in pairs if not equals]:
            raise ValueError(f"{unclear[0].strip()!r} is no name=value")
        text = {name.strip().lower(): value.strip() for name, _, value in pairs}
        return _convert(kind, text, strict=False)
    if not isinstance(text, dict):
        raise ValueError("")
    return _convert(kind, {str(name).lower(): value for name, value in text.items()}, strict=True)


def takes(kind: type[msgspec.Struct]) -> str:
    """The options of a tool in words."""
    return "name=value, divided by commas, of " + ", ".join(kind.__struct_fields__)


def _convert(kind: type[msgspec.Struct], values: Mapping[str, object], strict: bool) -> msgspec.Struct:
    try:
        return msgspec.convert({name.replace("-", "_"): value for name, value in values.items()}, kind, strict=strict)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None
