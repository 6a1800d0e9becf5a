"""Index of collected files, `.collect/index.jsonl`: the last line of a file counts."""

from __future__ import annotations

from pathlib import Path

import msgspec

from autoprof.base import files
from autoprof.base.originals import json
from autoprof.rundir.file_names import COLLECTING, LINES
from autoprof.rundir.jsonl import lines


class Entry(msgspec.Struct, frozen=True):
    """A file here: of which node it is, and how the node had it."""

    target: str
    node: str
    path: str
    size: int
    mtime_ns: int
    sha256: str


class Index:
    """The files of a run directory that came from other nodes."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._file = run / COLLECTING / f"index{LINES}"
        self._by_target: dict[str, Entry] = {}
        self._targets: dict[tuple[str, str], str] = {}
        try:
            for line in lines(self._file):
                self._take(line or b"")
        except OSError:  # nothing was collected yet
            pass

    def owner(self, target: str) -> str:
        """Return the node that a file here came from; an empty text where it came from none."""
        entry = self._by_target.get(target)
        return entry.node if entry else ""

    def target(self, node: str, path: str) -> str:
        """Return what a node's file is called here, or an empty text where it was not collected yet."""
        target = self._targets.get((node, path), "")
        return target if self.owner(target) == node else ""

    def same(self, node: str, path: str, size: int, mtime_ns: int) -> bool:
        """Return whether a node's file is here as the node has it now."""
        entry = self._by_target.get(self.target(node, path))
        if entry is None or (entry.size, entry.mtime_ns) != (size, mtime_ns):
            return False
        try:
            found = (self._run / entry.target).lstat()
        except OSError:
            return False
        return (found.st_size, found.st_mtime_ns) == (size, mtime_ns)

    def files_of(self, node: str) -> int:
        """Return how many files were collected from a node."""
        return sum(entry.node == node for entry in self._by_target.values())

    def add(self, entries: list[Entry]) -> None:
        """Note files that have come.

        Raises:
            OSError: It can't be written.
        """
        # Names may be of any bytes, which msgspec does not take.
        text = [json.dumps(msgspec.to_builtins(entry)).encode() + b"\n" for entry in entries]
        if text:
            files.append(self._file, b"".join(text))
        for entry in entries:
            self._note(entry)

    def _take(self, line: bytes) -> None:
        try:
            self._note(msgspec.convert(json.loads(line), Entry))
        except (ValueError, RecursionError, msgspec.MsgspecError):  # it was cut off
            pass

    def _note(self, entry: Entry) -> None:
        self._by_target[entry.target] = entry
        self._targets[entry.node, entry.path] = entry.target
