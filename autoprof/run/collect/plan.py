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

# What stands after the name of a capture.
_ENDINGS = (TRACE, META, SNAPSHOT, NSYS_REPORT, LINES, JSON)
_DEEPEST = 16
# Less than file systems take: parts of files have longer names.
_LONGEST = 220


def safe(path: object) -> bool:
    """Return whether a path from another node leads into the run directory, and to no file of collect's own."""
    if not isinstance(path, str) or "\0" in path:
        return False
    parts = path.split("/")
    names = all(part not in ("", ".", "..") and len(os.fsencode(part)) <= _LONGEST for part in parts)
    return names and len(parts) <= _DEEPEST and not parts[0].startswith(".") and not path.endswith(PART)


def group(path: str) -> str:
    """Return what a file belongs to: the files of a capture have one name and several endings."""
    folder, _, name = path.rpartition("/")
    parts = path.split("/")
    for place, part in enumerate(parts[:-1]):
        if found := file_names.FOLDER.search(part):
            return "/".join([*parts[:place], part.removesuffix(found.group())])
    for ending in _ENDINGS:
        if name.endswith(ending):
            return "/".join(filter(None, [folder, name.removesuffix(ending)]))
    return path


def of_node(path: str, node: str) -> str:
    """Return what a file is called that another of the same name is there of already."""
    belongs = group(path)
    return f"{belongs}.node-{node[:12]}{path.removeprefix(belongs)}"


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


# A file of a node: its path, its bytes, when it was written to.
Listed = tuple[str, int, int]


class Plan:
    """The files to fetch from one node.

    Attributes:
        unsafe: Paths that lead out of the run directory.
        changed: Files that changed while they were read, for another try.
        again: Whether this is the other try.
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
        """Yield the files that are to be fetched; `fetcher.progress` is told of those that are not.

        Raises:
            Lost: The node does not answer any more.
        """
        fetched: list[Listed] = []
        disputed: list[Listed] = []
        for path, size, mtime_ns in files:
            if not safe(path):
                self.unsafe.append(str(path))
            elif self._index.same(self._node, path, size, mtime_ns) or self._others_run_json(path):
                fetcher.progress(size)
            elif self._index.target(self._node, path) or self._replaced(path):
                fetched.append((path, size, mtime_ns))
            else:
                disputed.append((path, size, mtime_ns))
        apart, grown = self._compared(disputed, fetcher)
        for path, size, mtime_ns in [*fetched, *grown]:
            target = self._index.target(self._node, path)
            yield File(path, size, mtime_ns, target or (of_node(path, self._node) if group(path) in apart else path))
        for path, size, mtime_ns in disputed:
            if group(path) in apart:
                yield File(path, size, mtime_ns, of_node(path, self._node))
            elif (path, size, mtime_ns) not in grown:
                fetcher.progress(size)

    def _replaced(self, path: str) -> bool:
        """Return whether nothing speaks against the file's own name."""
        return not os.path.lexists(self._run / path) or path == RUN

    def _others_run_json(self, path: str) -> bool:
        """Return whether it is a `run.json` that does not count.

        Each part has one, made when the first process joined there; that of the driver's node says how the run ended.
        """
        return path == RUN and not self._driver and os.path.lexists(self._run / RUN)

    def _compared(self, disputed: Sequence[Listed], fetcher: Fetcher) -> tuple[set[str], list[Listed]]:
        """Return groups of which something else here has the same name, and files that have grown since.

        Those were collected by somebody who was killed before it was noted where they came from.
        """
        here = {path: max(0, _size(self._run / path)) for path, _, _ in disputed}
        lengths = {path: min(size, here[path]) if path.endswith(LINES) else size for path, size, _ in disputed}
        theirs = fetcher.digests([(path, lengths[path]) for path, _, _ in disputed])
        apart: set[str] = set()
        grown = []
        for (path, size, mtime_ns), digest in zip(disputed, theirs, strict=True):
            length = lengths[path]
            if not digest or here[path] != length or sha256(self._run / path, length) != digest:
                apart.add(group(path))
            elif length < size:
                grown.append((path, size, mtime_ns))
        return apart, [each for each in grown if group(each[0]) not in apart]


def captures(unfinished: Iterable[str]) -> list[str]:
    """Return what is not complete, each capture once: it may have several files that end in `.part`."""
    halves = [*(f"{ending}{PART}" for ending in (TRACE, *RAW_ENDINGS, META)), PART]
    found = []
    for path in unfinished:
        ending = next((each for each in halves if path.endswith(each)), "")
        found.append(path.removesuffix(ending))
    return sorted(set(found))


def writers(run: Path, index: Index) -> set[str]:
    """Return the nodes whose processes have written into this directory themselves, by what they left in `hooks/`."""
    own = [path for path in RunDir(run).hooks_files() if not index.owner(f"hooks/{path.name}")]
    return {decoder.read(path, HooksFile).node for path in own}


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return -1
