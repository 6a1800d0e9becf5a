"""Plan of the files to fetch from a node, and of their names here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from autoprof.base.originals import os
from autoprof.run.collect.fetch import Fetcher, File, sha256
from autoprof.run.collect.index import Index
from autoprof.run.collect.places import group, of_node, safe
from autoprof.rundir import decoder
from autoprof.rundir.file_names import LINES, META, PART, RAW_ENDINGS, RUN, TRACE
from autoprof.rundir.layout import RunDir
from autoprof.rundir.records import HooksFile

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
