"""Stand-in for torch_npu, which can't be imported without Ascend's own libraries.

It writes the folders that torch_npu writes, without data in them. Its functions take what those of the release that
`TORCH_NPU_STAND_IN` names take, by the stored signatures (tests/contracts/torch_npu.json).
`TORCH_NPU_STAND_IN_FAULT` names what goes wrong: init, start, stop or analyse.
"""

from __future__ import annotations

from . import npu, profiler
from .released import VERSION

__all__ = ["npu", "profiler"]
__version__ = VERSION


def autoload() -> None:
    """torch calls it when it is imported, by an entry point, as it does torch_npu's from 2.5 on."""
