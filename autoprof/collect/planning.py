"""Decides which files of a node are fetched, and what they are called here."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from autoprof import listing
from autoprof.collect.fetching import Fetcher, File, sha256
from autoprof.collect.index import Index
from autoprof.collect.naming import group, of_node, safe
from autoprof.rundir import META, RAW_ENDINGS, TRACE

RUN = "run.json"


class Plan:
    """What is fetched from one node.

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

    def made(self, files: Sequence[tuple[str, int, int]], fetcher: Fetcher) -> Iterator[File]:
        """The files that are to be fetched; `fetcher.progress` is told of those that are not.

        Raises:
            Lost: The node does not answer any more.
        """
        fetched: list[tuple[str, int, int]] = []
        disputed: list[tuple[str, int, int]] = []
        for path, size, mtime_ns in files:
            if not safe(path):
                self.unsafe.append(str(path))
            elif self._index.same(self._node, path, size, mtime_ns) or self._others_run_json(path):
                fetcher.progress(size)
            elif self._index.target(self._node, path) or self._replaced(path):
                fetched.append((path, size, mtime_ns))
            else:
                disputed.append((path, size, mtime_ns))
        apart = self._apart(disputed, fetcher)
        for path, size, mtime_ns in fetched:
            target = self._index.target(self._node, path)
            yield File(path, size, mtime_ns, target or (of_node(path, self._node) if group(path) in apart else path))
        for path, size, mtime_ns in disputed:
            if group(path) not in apart:
                fetcher.progress(size)
            else:
                yield File(path, size, mtime_ns, of_node(path, self._node))

    def _replaced(self, path: str) -> bool:
        """Whether nothing speaks against the file's own name."""
        return not os.path.lexists(self._run / path) or path == RUN

    def _others_run_json(self, path: str) -> bool:
        """Each part has one, made when the first process joined there; that of the driver's node tells how it ended."""
        return path == RUN and not self._driver and os.path.lexists(self._run / RUN)

    def _apart(self, disputed: Sequence[tuple[str, int, int]], fetcher: Fetcher) -> set[str]:
        """The groups of which something here has the same name and is something else."""
        theirs = fetcher.digests([(path, size) for path, size, _ in disputed])
        return {
            group(path)
            for (path, size, _), digest in zip(disputed, theirs, strict=True)
            if not digest or _size(self._run / path) != size or sha256(self._run / path, size) != digest
        }


def captures(unfinished: Iterable[str]) -> list[str]:
    """What is not complete, each capture once: it may have several files that end in `.part`."""
    halves = [*(f"{ending}.part" for ending in (TRACE, *RAW_ENDINGS, META)), ".part"]
    found = []
    for path in unfinished:
        ending = next(each for each in halves if path.endswith(each))
        found.append(path.removesuffix(ending))
    return sorted(set(found))


def wrote_here(run: Path, node: str, index: Index) -> bool:
    """Whether processes of a node have written into this directory themselves, by what they left in `hooks/`."""
    for path in sorted((run / "hooks").glob("*.json")):
        if listing.load_json(path).get("node") == node and not index.owner(f"hooks/{path.name}"):
            return True
    return False


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return -1
