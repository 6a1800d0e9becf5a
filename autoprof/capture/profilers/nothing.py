"""Stand-in for a profiler in a process that has not imported torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from autoprof.config.settings import Settings

NO_TORCH = "no torch in this process"
IMPORTED_LATE = "the process had not imported torch when this capture began"


class NothingTool:
    """Tool that records nothing and writes no file. Its captures have only a meta file.

    Every profiler needs torch. Importing it would take seconds and hundreds of megabytes in a process that does not use
    it.
    """

    name = "none"
    ending = ""
    lost: Sequence[str] = ()

    @property
    def remark(self) -> str:
        """Reason why nothing is recorded."""
        return IMPORTED_LATE if has_torch() else NO_TORCH

    def start(self, settings: Settings, raw: Path) -> list[str]:
        return []

    def stamp(self, subject: dict[str, Any]) -> None:
        """Do nothing."""

    def mark(self, name: str) -> Callable[[], None]:
        return _nothing

    def stop(self) -> None:
        """Do nothing."""

    def abort(self) -> None:
        """Do nothing."""

    def export(self, path: str) -> None:
        """Do nothing."""

    def busy(self) -> str:
        return ""


def has_torch() -> bool:
    """Return True if this process has imported torch or is importing it."""
    return sys.modules.get("torch") is not None


def _nothing() -> None:
    """Do nothing: no range has begun."""
