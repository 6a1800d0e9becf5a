from __future__ import annotations

import os


def is_initialized() -> bool:
    return os.environ.get("TORCH_NPU_STAND_IN_IDLE") is None
