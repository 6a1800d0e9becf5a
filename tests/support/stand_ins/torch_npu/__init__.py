"""Stand-in for torch_npu, which can't be imported without Ascend's libraries.

It writes the same folders as torch_npu, without data. `TORCH_NPU_STAND_IN` names a release, and the functions take the
parameters of that release, from the stored signatures (tests/contracts/torch_npu.json). `TORCH_NPU_STAND_IN_FAULT`
names the call that fails: init, start, stop or analyse.
"""

from __future__ import annotations

from . import npu, profiler
from .released import VERSION

__all__ = ["npu", "profiler"]
__version__ = VERSION


def autoload() -> None:
    """Do nothing. On import, torch calls this through an entry point, as it calls torch_npu's from 2.5 on."""
