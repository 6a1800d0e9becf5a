"""Nsight Systems: windows and ranges in a process that runs under `nsys`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from autoprof import rundir
from autoprof.settings import Settings


class NsysTool:
    """Opens and closes the ranges that `nsys` captures."""

    name = "nsys"
    ending = rundir.NSYS_REPORT

    @staticmethod
    def unavailable() -> str:
        """Why this process can't be recorded by nsys, or an empty text."""
        return "Nsight Systems is not in this version"

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
