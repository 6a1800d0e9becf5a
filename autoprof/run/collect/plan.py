"""Plan of the files to fetch from a node, their names here, and the index of those already fetched."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from autoprof.base import files
from autoprof.base.originals import json, os
from autoprof.run.collect.fetch import Fetcher, File, sha256
from autoprof.rundir import decoder, file_names
from autoprof.rundir.file_names import (
    COLLECTING,
    JSON,
    LINES,
    META,
    NSYS_REPORT,
    PART,
    RAW_ENDINGS,
    RUN,
    SNAPSHOT,
    TRACE,
)
from autoprof.rundir.jsonl import lines
from autoprof.rundir.layout import RunDir
from autoprof.rundir.records import HooksFile

# Endings of the files of a capture.
_ENDINGS = (TRACE, META, SNAPSHOT, NSYS_REPORT, LINES, JSON)
_MAX_DEPTH = 16
# Maximum length of a name in bytes. File systems allow 255, but unfinished files have longer names.
_MAX_NAME_BYTES = 220


def safe(path: object) -> bool:
    """Return True if a path from another node stays in the run directory, and is not a temporary file."""
    if not isinstance(path, str) or "\0" in path:
        return False
    parts = path.split("/")
    names = all(part not in ("", ".", "..") and len(os.fsencode(part)) <= _MAX_NAME_BYTES for part in parts)
    return names and len(parts) <= _MAX_DEPTH and not parts[0].startswith(".") and not path.endswith(PART)


def group(path: str) -> str:
    """Return the group of a file: its path without ending. The files of a capture form one group."""
    folder, _, name = path.rpartition("/")
    parts = path.split("/")
    for index, part in enumerate(parts[:-1]):
        if match := file_names.FOLDER.search(part):
            return "/".join([*parts[:index], part.removesuffix(match.group())])
    for ending in _ENDINGS:
        if name.endswith(ending):
            return "/".join(filter(None, [folder, name.removesuffix(ending)]))
    return path


def of_node(path: str, node: str) -> str:
    """Return the name of a node's file here, if another file already has its own name."""
    stem = group(path)
    return f"{stem}.node-{node[:12]}{path.removeprefix(stem)}"


class Entry(msgspec.Struct, frozen=True):
    """A collected file: its path here, its node, and its path, size and last change on the node."""

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
        except OSError:  # nothing has been collected yet
            pass

    def owner(self, target: str) -> str:
        """Return the node that a file here came from; an empty text for a file that was not collected."""
        entry = self._by_target.get(target)
        return entry.node if entry else ""

    def target(self, node: str, path: str) -> str:
        """Return the path here of a node's file, or an empty text if it was not collected."""
        target = self._targets.get((node, path), "")
        return target if self.owner(target) == node else ""

    def same(self, node: str, path: str, size: int, mtime_ns: int) -> bool:
        """Return True if a node's file is here in its current state."""
        entry = self._by_target.get(self.target(node, path))
        if entry is None or (entry.size, entry.mtime_ns) != (size, mtime_ns):
            return False
        try:
            status = (self._run / entry.target).lstat()
        except OSError:
            return False
        return (status.st_size, status.st_mtime_ns) == (size, mtime_ns)

    def files_of(self, node: str) -> int:
        """Return the number of files collected from a node."""
        return sum(entry.node == node for entry in self._by_target.values())

    def add(self, entries: list[Entry]) -> None:
        """Add collected files to the index.

        Raises:
            OSError: The index can't be written.
        """
        # `json`, because names may contain any bytes and msgspec refuses lone surrogates.
        text = [json.dumps(msgspec.to_builtins(entry)).encode() + b"\n" for entry in entries]
        if text:
            files.append(self._file, b"".join(text))
        for entry in entries:
            self._note(entry)

    def _take(self, line: bytes) -> None:
        try:
            self._note(msgspec.convert(json.loads(line), Entry))
        except (ValueError, RecursionError, msgspec.MsgspecError):  # the line is cut off
            pass

    def _note(self, entry: Entry) -> None:
        self._by_target[entry.target] = entry
        self._targets[entry.node, entry.path] = entry.target


# A file of a node: its path, its size in bytes, and its last change in nanoseconds since the epoch.
Listed = tuple[str, int, int]


class Plan:
    """The files to fetch from one node.

    Attributes:
        unsafe: Paths that lead out of the run directory.
        changed: Files that changed while they were read, for a second try.
        again: True during the second try.
    """

    def __init__(self, run: Path, node: str, index: Index, driver: bool) -> None:
        self._run = run
        self._node = node
        self._index = index
        self._driver = driver
        self.unsafe: list[str] = []
        self.changed: list[File] = []
        self.again = False

    def made(self, files: Sequence[Listed], fetcher: Fetcher) -> Iterator[File]:
        """Yield the files to fetch. Report the sizes of all other files to `fetcher.progress`.

        Raises:
            NodeLost: The node does not answer.
        """
        fetched: list[Listed] = []
        disputed: list[Listed] = []
        for path, size, mtime_ns in files:
            if not safe(path):
                self.unsafe.append(str(path))
            elif self._index.same(self._node, path, size, mtime_ns) or self._is_other_run_json(path):
                fetcher.progress(size)
            elif self._index.target(self._node, path) or self._may_replace(path):
                fetched.append((path, size, mtime_ns))
            else:
                disputed.append((path, size, mtime_ns))
        different, grown = self._compare(disputed, fetcher)
        for path, size, mtime_ns in [*fetched, *grown]:
            target = self._index.target(self._node, path)
            yield File(
                path, size, mtime_ns, target or (of_node(path, self._node) if group(path) in different else path)
            )
        for path, size, mtime_ns in disputed:
            if group(path) in different:
                yield File(path, size, mtime_ns, of_node(path, self._node))
            elif (path, size, mtime_ns) not in grown:
                fetcher.progress(size)

    def _may_replace(self, path: str) -> bool:
        """Return True if the file can have its own name here: no file has it, or it is `run.json`."""
        return not os.path.lexists(self._run / path) or path == RUN

    def _is_other_run_json(self, path: str) -> bool:
        """Return True if the file is a `run.json` that is not needed.

        Each part has one from the first process there. The one on the driver's node has the result of the run.
        """
        return path == RUN and not self._driver and os.path.lexists(self._run / RUN)

    def _compare(self, disputed: Sequence[Listed], fetcher: Fetcher) -> tuple[set[str], list[Listed]]:
        """Compare a node's files with local files of the same names that are not in the index.

        Such a local file may come from a collection that was killed before it wrote the index.

        Returns:
            The groups with a different local file, and the files that have grown since they were collected.
        """
        here = {path: max(0, _size(self._run / path)) for path, _, _ in disputed}
        lengths = {path: min(size, here[path]) if path.endswith(LINES) else size for path, size, _ in disputed}
        node_sums = fetcher.digests([(path, lengths[path]) for path, _, _ in disputed])
        different: set[str] = set()
        grown = []
        for (path, size, mtime_ns), digest in zip(disputed, node_sums, strict=True):
            length = lengths[path]
            if not digest or here[path] != length or sha256(self._run / path, length) != digest:
                different.add(group(path))
            elif length < size:
                grown.append((path, size, mtime_ns))
        return different, [listed for listed in grown if group(listed[0]) not in different]


def captures(unfinished: Iterable[str]) -> list[str]:
    """Return the names of unfinished captures, each once: a capture may have several files that end in `.part`."""
    endings = [*(f"{ending}{PART}" for ending in (TRACE, *RAW_ENDINGS, META)), PART]
    names = []
    for path in unfinished:
        path_ending = next((ending for ending in endings if path.endswith(ending)), "")
        names.append(path.removesuffix(path_ending))
    return sorted(set(names))


def writers(run: Path, index: Index) -> set[str]:
    """Return the nodes whose processes wrote into this directory directly, from the files in `hooks/`."""
    own = [path for path in RunDir(run).hooks_files() if not index.owner(f"hooks/{path.name}")]
    return {decoder.read(path, HooksFile).node for path in own}


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return -1
