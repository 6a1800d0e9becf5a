from __future__ import annotations

import itertools
import os
import socket
from pathlib import Path

from ..released import as_released

_times = itertools.count(20261120120000000)


class _Creator:
    """Path of the next recording, one for the whole process."""

    def __init__(self) -> None:
        self._worker_name: str | None = None
        self._dir_path: str | None = None

    @as_released("torch_npu.profiler._profiler_path_creator", "ProfPathCreator.init")
    def init(self, worker_name: str | None = None, dir_name: str | None = None, **_: bool) -> None:
        self._worker_name = worker_name
        self._dir_path = os.path.realpath(dir_name) if isinstance(dir_name, str) and dir_name else None

    def create(self) -> Path:
        name = f"{self._worker_name or socket.gethostname()}_{os.getpid()}_{next(_times)}_ascend_pt"
        folder = Path(self._dir_path or os.getcwd(), name)
        folder.mkdir(parents=True, mode=0o750)
        return folder


_only = _Creator()


def ProfPathCreator() -> _Creator:
    return _only
