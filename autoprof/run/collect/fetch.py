"""Fetcher of files from one node: file by file, in pieces, verified before renaming."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from autoprof.base import files
from autoprof.base.originals import io, json, os, time
from autoprof.run import cluster
from autoprof.rundir.file_names import COLLECTING, LINES, PART, RUN
from autoprof.rundir.journal import lines
from autoprof.rundir.records import Size

# Timeout for the answer of a node: Ray may have to start a worker there, and its disk may be slow.
_CALL_S = 120.0
_POLL_S = 0.2
# Number of calls of a node that are pending at a time.
MAX_PENDING = 3


class NodeLost(Exception):
    """A node does not answer. The message gives the reason."""


class RayNode:
    """A node of the Ray cluster that this process is connected to. It runs functions of `node_functions.py`.

    All its calls end at `deadline`, by `time.monotonic`.
    """

    def __init__(self, ray: Any, task: Any, node: str, deadline: float) -> None:
        self._ray = ray
        self._task = task
        self._node = node
        self._deadline = deadline

    def ask(self, name: str, *arguments: Any) -> tuple[Any, float]:
        """Start a call of the function `name`. Return Ray's reference, and the time by `time.monotonic`."""
        call = cluster.on_node(self._task, self._node, f"autoprof_collect_{name}", retries=2)
        return call.remote(name, *arguments), time.monotonic()

    def answer(self, call: tuple[Any, float]) -> Any:
        """Wait for the result of a call.

        Raises:
            NodeLost: The node does not answer, or the time is used up.
        """
        reference, since = call
        problem = ""
        try:
            while not problem:
                # Wait with short timeouts: Ray must not shut down while this thread waits in it.
                done, _ = self._ray.wait([reference], timeout=_POLL_S)
                if time.monotonic() > self._deadline:
                    problem = "there was no time left"
                elif done:
                    return self._ray.get(reference)
                elif time.monotonic() > since + _CALL_S:
                    problem = f"no answer within {_CALL_S:.0f} s"
            self._ray.cancel(reference)
        except (self._ray.exceptions.RayError, ConnectionError) as error:  # a worker or the node has died
            first = (str(error).strip().splitlines() or [""])[0]
            is_alive = any(node["NodeID"] == self._node and node["Alive"] for node in self._ray.nodes())
            problem = f"{type(error).__name__}: {first[:200]}" if is_alive else DIED
        raise NodeLost(problem)


DIED = "the node has died"


class File(NamedTuple):
    """A file of a node: its path in the node's part of the run, its size in bytes, and its last change.

    The last change is in nanoseconds since the epoch.
    """

    path: str
    size: Size
    mtime_ns: int


_MAX_DEPTH = 16
# Maximum length of a name in bytes. File systems allow 255, but unfinished files have longer names.
_MAX_NAME_BYTES = 220


def safe(path: str) -> bool:
    """Return True if a path from another node stays in the run directory, and is not a temporary file."""
    parts = path.split("/")
    names = all(part not in ("", ".", "..") and len(os.fsencode(part)) <= _MAX_NAME_BYTES for part in parts)
    is_hidden = parts[0].startswith(".") or path.endswith(PART)
    return names and len(parts) <= _MAX_DEPTH and not is_hidden and "\0" not in path


# The end of a name, which readers rely on.
_ENDING = re.compile(r"_\d+_\d+_ascend_pt/|\.pt\.trace\.json\.gz\Z|\.meta\.json\Z|\.[a-z-]+\Z|\Z")


def of_node(path: str, node: str) -> str:
    """Return the name of a node's file here, if another file already has its own name."""
    return _ENDING.sub(lambda ending: f".node-{node[:12]}{ending[0]}", path, count=1)


class Index:
    """The nodes of the files in a run directory that came from other nodes."""

    def __init__(self, run: Path) -> None:
        self._file = run / COLLECTING / f"index{LINES}"
        self.nodes: dict[str, str] = {}
        with contextlib.suppress(OSError):  # nothing has been collected yet
            for line in lines(self._file):
                with contextlib.suppress(ValueError, TypeError, RecursionError):  # the line is cut off
                    target, node = json.loads(line)
                    self.nodes[str(target)] = str(node)

    def target(self, node: str, path: str) -> str:
        """Return the path of a node's file here."""
        own_name = of_node(path, node)
        return own_name if self.nodes.get(own_name) == node else path

    def add(self, target: str, node: str) -> None:
        """Add a file. Call this before the file appears, so that it is never taken for a file of this node.

        Raises:
            OSError: The index can't be written.
        """
        if self.nodes.get(target) != node:
            # `json`, because names may contain any bytes and msgspec refuses lone surrogates.
            files.append(self._file, json.dumps([target, node]).encode() + b"\n")
            self.nodes[target] = node


# Maximum size of a piece of files, in bytes.
PIECE = 8 << 20
# Maximum number of pieces in one call.
_MAX_PIECES = 512
# Number of bytes after which a call for checksums takes no further files.
_MAX_SUMMED_BYTES = 512 << 20
CHANGED = "it changed while it was read"
NOT_EQUAL = "the received bytes differ from the node's file (sha256)"


class Piece(NamedTuple):
    """A part of a file."""

    file: File
    offset: int
    length: int

    @property
    def request(self) -> tuple[str, int, int, int, int]:
        """Return the arguments of `read` on the node. Processes only append to a `.jsonl` file."""
        path, size, mtime_ns = self.file
        return path, self.offset, self.length, size, 0 if path.endswith(LINES) else mtime_ns


class Fetcher:
    """Fetcher of files from one node into a run directory.

    Attributes:
        progress: Callback with the number of bytes that were added.
    """

    def __init__(
        self, run: Path, node: str, directory: str, source: RayNode, index: Index, progress: Callable[[int], object]
    ) -> None:
        self._run = run
        self._node = node
        self._directory = directory
        self._source = source
        self._index = index
        self.progress = progress

    def outdated(self, node_files: Sequence[File]) -> list[File]:
        """Return the files that are missing here or have changed. Compare files of equal size by their sha256.

        Raises:
            NodeLost: The node does not answer.
        """
        outdated: list[File] = []
        compared: list[Piece] = []
        for file in node_files:
            if self.is_here(file):
                self.progress(file.size)
            elif _size(self._run / self._index.target(self._node, file.path)) == file.size:
                compared.append(Piece(file, 0, file.size))
            else:
                outdated.append(file)
        for piece, node_sum in self._answers("digest", compared, _MAX_SUMMED_BYTES):
            if node_sum and node_sum == _sha256(self._run / self._index.target(self._node, piece.file.path)):
                self.progress(piece.length)
            else:
                outdated.append(piece.file)
        return outdated

    def is_here(self, file: File) -> bool:
        """Return True if a file was fetched from this node and has not changed since, on either side."""
        target = self._index.target(self._node, file.path)
        if self._index.nodes.get(target) != self._node:
            return False
        status = files.status(self._run / target, follow=False)
        return status is not None and (status.st_size, status.st_mtime_ns) == (file.size, file.mtime_ns)

    def fetch(self, wanted: Sequence[File]) -> Iterator[tuple[File, str]]:
        """Fetch files. Yield each with its problem, or an empty text.

        Raises:
            NodeLost: The node does not answer.
            OSError: A file can't be written here, for example because the disk is full.
        """
        failed: set[File] = set()
        pieces = (
            Piece(file, offset, min(PIECE, file.size - offset))
            for file in wanted
            for offset in range(0, max(1, file.size), PIECE)
            if file not in failed
        )
        part = self._run / COLLECTING / f"{os.urandom(8).hex()}{PART}"
        try:
            for piece, (data, node_sum, problem) in self._answers("read", pieces, PIECE):
                file = piece.file
                if file in failed:
                    continue
                problem = _problem(piece, data, node_sum, problem)
                if not problem:
                    if piece.offset == 0:
                        os.close(files.create(part))
                    files.append(part, data)
                    self.progress(piece.length)
                    if piece.offset + piece.length < file.size:
                        continue
                    problem = self._place(file, part)
                if problem:
                    failed.add(file)
                yield file, problem
        finally:
            files.remove(str(part))

    def _answers(self, name: str, pieces: Iterable[Piece], max_bytes: int) -> Iterator[tuple[Piece, Any]]:
        """Yield pieces, each with the result of a function of the node. A few calls are pending at a time."""
        pending: deque[tuple[list[Piece], Any]] = deque()
        for bundle in _bundles(pieces, max_bytes):
            if len(pending) == MAX_PENDING:
                yield from self._answer(*pending.popleft())
            pending.append((bundle, self._source.ask(name, self._directory, [piece.request for piece in bundle])))
        while pending:
            yield from self._answer(*pending.popleft())

    def _answer(self, bundle: list[Piece], call: Any) -> Iterator[tuple[Piece, Any]]:
        return zip(bundle, self._source.answer(call), strict=True)

    def _place(self, file: File, part: Path) -> str:
        """Rename a fetched file. Return the problem, or an empty text.

        Processes of two containers may have the same host name and pid. If another file has the name, keep both. If one
        of them is the beginning of the other, both are copies of one file: keep the longer one.
        """
        target = self._index.target(self._node, file.path)
        path = self._run / target
        if self._index.nodes.get(target) != self._node and file.path != RUN and os.path.lexists(path):
            if not _begin_alike(part, path):
                target = of_node(file.path, self._node)
                path = self._run / target
            elif _size(path) >= file.size:
                return ""
        try:
            for parent in reversed(Path(target).parents[:-1]):
                files.folder(self._run / parent)
            self._index.add(target, self._node)
            os.replace(part, path)
            # Keep the time of the last change, because reports use it.
            os.utime(path, ns=(file.mtime_ns, file.mtime_ns), follow_symlinks=False)
        except FileExistsError:
            return f"{path.parent} exists and is not a folder"
        except IsADirectoryError:
            return f"{path} is a folder"
        return ""


def _bundles(pieces: Iterable[Piece], max_bytes: int) -> Iterator[list[Piece]]:
    """Yield groups of pieces for one call each."""
    bundle: list[Piece] = []
    for piece in pieces:
        if bundle and (sum(each.length for each in bundle) + piece.length > max_bytes or len(bundle) == _MAX_PIECES):
            yield bundle
            bundle = []
        bundle.append(piece)
    if bundle:
        yield bundle


def _problem(piece: Piece, data: bytes, node_sum: str, problem: str) -> str:
    """Return the problem of a received piece, or an empty text."""
    if problem == "changed" or (not problem and len(data) != piece.length):
        return CHANGED
    if not problem and hashlib.sha256(data).hexdigest() != node_sum:
        return NOT_EQUAL
    return problem


def _size(path: Path) -> int:
    """Return the size of a file here, or -1 if it does not exist."""
    status = files.status(path, follow=False)
    return -1 if status is None else status.st_size


def _sha256(path: Path) -> str:
    """Return the sha256 of a file here, or an empty text if it can't be read."""
    sums = hashlib.sha256()
    try:
        with io.open(files.opened(path), "rb") as file:
            while block := file.read(1 << 20):
                sums.update(block)
    except OSError:
        return ""
    return sums.hexdigest()


def _begin_alike(first: Path, second: Path) -> bool:
    """Return True if one of two files is the beginning of the other."""
    try:
        with io.open(files.opened(first), "rb") as one, io.open(files.opened(second), "rb") as other:
            while (block := one.read(1 << 20)) and (other_block := other.read(1 << 20)):
                length = min(len(block), len(other_block))
                if block[:length] != other_block[:length]:
                    return False
    except OSError:
        return False
    return True
