"""Options of each tool besides the contents: `AUTOPROF_NPU="level=level2,mstx=false"`, or a table `[npu]`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from autoprof.config import structs


@structs.complete
class NpuOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of torch_npu's profiler, by the names in its `_ExperimentalConfig` (torch_npu 2.5.1 to 2.14.0).

    Attributes:
        level: Amount of data collected from the device.
        aic_metrics: Counters of the AI cores; by default `none` at `level_none` and `level0`.
        export: Output of the analysis: text for Perfetto, databases for MindStudio Insight, or both.
        mstx: Whether ranges that frameworks mark are recorded, communication excepted.
        l2_cache: Whether hits of the L2 cache are counted.
        op_attr: Whether operators' attributes are collected, with `db` or `both`.
        analyse: Whether another process analyses each recording right after it; `autoprof analyse` does it later.
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


@structs.complete
class NsysOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of Nsight Systems.

    Attributes:
        trace: Value of `nsys profile --trace`, separated by `+`.
        sample: Value of `nsys profile --sample`; `process-tree` samples host stacks and context switches.
        python_backtrace: Whether CUDA calls hold the Python stack (`--python-backtrace=cuda`).
        gpu_metrics: Devices whose hardware counters are sampled (`--gpu-metrics-devices`), separated by `+`; `all`, or
            `none`.
        executable: The `nsys` to use; with Ray the file must have this name. By default the first on the path.
    """

    trace: str = "cuda+nvtx+osrt+cublas+cudnn"
    sample: Literal["none", "process-tree"] = "none"
    python_backtrace: bool = False
    gpu_metrics: str = "none"
    executable: str = "nsys"


@structs.complete
class MemoryOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the history of CUDA's caching allocator (torch.cuda.memory).

    Attributes:
        max_entries: Allocations and frees kept, the last ones, of some kB each.
        stacks: Stacks kept with them: Python's, also C++'s (slow to write), or none.
        oom: Whether a snapshot is written to `oom/` when CUDA runs out of memory, in any step; three a process at most.
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
    """Describe the options of a tool in words."""
    return "name=value, divided by commas, of " + ", ".join(kind.__struct_fields__)


def _convert(kind: type[msgspec.Struct], values: Mapping[str, object], strict: bool) -> msgspec.Struct:
    try:
        return msgspec.convert({name.replace("-", "_"): value for name, value in values.items()}, kind, strict=strict)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None
