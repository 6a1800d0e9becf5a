"""torch_npu's `_ExperimentalConfig`, made from the options of `AUTOPROF_NPU`."""

from __future__ import annotations

import inspect
from typing import Any

from autoprof.config.tool_options import NpuOptions

_LEVELS = {"level_none": "Level_none", "level0": "Level0", "level1": "Level1", "level2": "Level2"}
_METRICS = {
    "pipe_utilization": "PipeUtilization",
    "arithmetic_utilization": "ArithmeticUtilization",
    "memory": "Memory",
    "memory_l0": "MemoryL0",
    "memory_ub": "MemoryUB",
    "memory_access": "MemoryAccess",
    "resource_conflict_ratio": "ResourceConflictRatio",
    "l2_cache": "L2Cache",
    "none": "AiCoreNone",
}
_EXPORTS = {"text": ("Text",), "db": ("Db",), "both": ("Text", "Db")}
# With others torch_npu counts nothing in AI cores (experimental_config.py, _check_params).
_COUNTING_LEVELS = ("level1", "level2")


def experimental_config(profiler: Any, options: NpuOptions) -> tuple[Any, list[str]]:
    """Return the `_ExperimentalConfig` for these options, and those of them that this torch_npu has not.

    All is said that it takes: the defaults changed in 2.13.
    """
    kind = profiler._ExperimentalConfig
    parameters = inspect.signature(kind).parameters
    arguments, lacking = _arguments(profiler, parameters, options)
    lacking += [name for name in arguments if name not in parameters and getattr(options, name, False)]
    return kind(**{name: value for name, value in arguments.items() if name in parameters}), lacking


def _arguments(profiler: Any, parameters: Any, options: NpuOptions) -> tuple[dict[str, Any], list[str]]:
    arguments: dict[str, Any] = {"l2_cache": options.l2_cache, "op_attr": options.op_attr}
    lacking = []
    metrics = options.aic_metrics
    if options.level not in _COUNTING_LEVELS:
        if metrics not in (NpuOptions().aic_metrics, "none"):
            lacking.append("aic_metrics")
        metrics = "none"
    for option, argument, owner, member in (
        ("level", "profiler_level", profiler.ProfilerLevel, _LEVELS[options.level]),
        ("aic_metrics", "aic_metrics", profiler.AiCMetrics, _METRICS[metrics]),
    ):
        if hasattr(owner, member):
            arguments[argument] = getattr(owner, member)
        else:
            lacking.append(option)
    exports = [getattr(profiler.ExportType, name) for name in _EXPORTS[options.export]]
    if len(exports) > 1 and not _takes_list(parameters.get("export_type")):
        # Before lists it took one word, and for anything else fell back to text.
        exports = exports[:1]
        lacking.append("export")
    arguments["export_type"] = exports if len(exports) > 1 else exports[0]
    if options.op_attr and options.export == "text":
        # It is in databases only, and torch_npu drops it for text.
        del arguments["op_attr"]
        lacking.append("op_attr")
    if options.mstx:
        # `mstx` is there from 2.7 on, and with it the older `msprof_tx` only warns.
        arguments["mstx" if "mstx" in parameters else "msprof_tx"] = True
        arguments["mstx_domain_exclude"] = ["communication"]
    return arguments, lacking


def _takes_list(parameter: inspect.Parameter | None) -> bool:
    return parameter is not None and "list" in str(parameter.annotation).lower()
