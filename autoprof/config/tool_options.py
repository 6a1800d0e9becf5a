"""Options of each tool besides the contents, from `AUTOPROF_NPU="level=level2,mstx=false"` or a table `[npu]`."""

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
        mstx: True to record ranges that frameworks mark, except those of communication.
        l2_cache: True to count hits of the L2 cache.
        op_attr: True to collect the attributes of operators, with `db` or `both`.
        analyse: True to analyse each recording right after it, in another process. `autoprof analyse` does it later.
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
        python_backtrace: True to record the Python stack of CUDA calls (`--python-backtrace=cuda`).
        gpu_metrics: Devices whose hardware counters are sampled (`--gpu-metrics-devices`), separated by `+`; `all`, or
            `none`.
        executable: The `nsys` to use, by default the first on the path. With Ray, its file name must be `nsys`.
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
        max_entries: Maximum number of allocations and frees kept, the newest ones. Each takes a few kB.
        stacks: Stacks of each entry: Python only, Python and C++ (`all`, slow to write), or none.
        oom: True to write a snapshot to `oom/` when CUDA runs out of memory, in any step; at most three per process.
    """

    max_entries: int = 100_000
    stacks: Literal["python", "all", "none"] = "python"
    oom: bool = False


KINDS: dict[str, type[msgspec.Struct]] = {"npu": NpuOptions, "nsys": NsysOptions, "memory": MemoryOptions}


def parse(kind: type[msgspec.Struct], text: object) -> msgspec.Struct:
    """Return the options of a tool, from a table or from text such as `level=level2,mstx=false`.

    Raises:
        ValueError: An option is unknown or has a wrong value. The message names it.
    """
    if isinstance(text, str):
        pairs = [pair.partition("=") for pair in text.split(",") if pair.strip()]
        if unclear := [name for name, equals, _ in pairs if not equals]:
            raise ValueError(f"{unclear[0].strip()!r} is not name=value")
        text = {name.strip().lower(): value.strip() for name, _, value in pairs}
        return _convert(kind, text, strict=False)
    if not isinstance(text, dict):
        raise ValueError("")
    return _convert(kind, {str(name).lower(): value for name, value in text.items()}, strict=True)


def takes(kind: type[msgspec.Struct]) -> str:
    """Return the options of a tool in words."""
    return "name=value, separated by commas, of " + ", ".join(kind.__struct_fields__)


def _convert(kind: type[msgspec.Struct], values: Mapping[str, object], strict: bool) -> msgspec.Struct:
    try:
        return msgspec.convert({name.replace("-", "_"): value for name, value in values.items()}, kind, strict=strict)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None
