from __future__ import annotations

from typing import Any

from ..released import as_released, constants

_HERE = "torch_npu.profiler.experimental_config"
ExportType: Any = constants(_HERE, "ExportType")
ProfilerLevel: Any = constants(_HERE, "ProfilerLevel")
AiCMetrics: Any = constants(_HERE, "AiCMetrics")


class _ExperimentalConfig:
    @as_released(_HERE, "_ExperimentalConfig.__init__")
    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments
