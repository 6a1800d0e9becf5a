"""What records: one class a tool, each with the methods of `Tool`."""

from __future__ import annotations

from typing import Protocol


class Tool(Protocol):
    """A recorder in this process."""

    name: str

    def start(self, contents: tuple[str, ...]) -> list[str]:
        """Begin to record `contents`, or what is usual where they are empty, and return what is recorded."""

    def stop(self) -> None:
        """End recording."""

    def export(self, path: str) -> None:
        """Write what was recorded, uncompressed."""

    def busy(self) -> str:
        """Why this process can't record now, or an empty text."""
