from __future__ import annotations

import enum

from .experimental_config import AiCMetrics, ExportType, ProfilerLevel, _ExperimentalConfig
from .profiler import profile, tensorboard_trace_handler

__all__ = ["AiCMetrics", "ExportType", "ProfilerActivity", "ProfilerLevel", "_ExperimentalConfig", "profile"]
__all__ += ["tensorboard_trace_handler"]


class ProfilerActivity(enum.Enum):
    CPU = 0
    NPU = 1
