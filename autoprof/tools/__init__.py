"""What records: one class a tool, each with the methods of `Tool`."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol


class Tool(Protocol):
    """A recorder in this process."""

    name: str

    def start(self, contents: tuple[str, ...]) -> list[str]:
        """Begin to record `contents`, and return those of them that this build does not know."""

    def stop(self) -> None:
        """End recording."""

    def export(self, path: Path) -> None:
        """Write what was recorded, uncompressed."""

    def busy(self) -> str:
        """Why this process can't record now, or an empty text."""
