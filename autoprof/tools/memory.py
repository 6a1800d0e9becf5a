"""The history of CUDA's caching allocator: allocations and frees with their stacks, a snapshot a window."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from autoprof import rundir
from autoprof.settings import Settings


class MemoryTool:
    """Records with `torch.cuda.memory` and writes a snapshot that torch's memory viewer opens."""

    name = "memory"
    ending = rundir.SNAPSHOT

    @staticmethod
    def unavailable() -> str:
        """Why this process can't record the allocator's history, or an empty text."""
        return "the memory history is not in this version"

    def start(self, settings: Settings, raw: Path) -> list[str]:
        raise NotImplementedError

    def stamp(self, subject: dict[str, Any]) -> None:
        raise NotImplementedError

    def mark(self, name: str) -> Callable[[], None]:
        raise NotImplementedError

    def stop(self) -> None:
        raise NotImplementedError

    def export(self, path: str) -> None:
        raise NotImplementedError

    def busy(self) -> str:
        return ""
