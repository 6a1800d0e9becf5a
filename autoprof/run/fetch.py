"""Fetcher of files from one node.

A file is fetched in pieces. Each piece is verified by its sha256. The file gets its final name when it is complete.
"""

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

# Timeout for the answer of a node. Ray may have to start a worker on the node, and the disk of the node may be slow.
_CALL_S = 120.0
_POLL_S = 0.2
# Maximum number of calls of one node that are pending at the same time.
MAX_PENDING = 3


class NodeLost(Exception):
    """A node does not answer. The message gives the reason."""


class RayNode:
    """A node of the Ray cluster that this process is connected to. The node runs functions of `node_functions.py`.

    Args:
        ray: The module `ray`, connected to the cluster.
        task: The remote function that `cluster.shipped` returns.
        node: Ray's id of the node.
        deadline: The time at which all calls end, by `time.monotonic`.
    """

    def __init__(self, ray: Any, task: Any, node: str, deadline: float) -> None:
        self._ray = ray
        self._task = task
        self._node = node
        self._deadline = deadline

    def ask(self, name: str, *arguments: Any) -> tuple[Any, float]:
        """Start a call of the function `name` on the node. Return the call: Ray's reference and its start.

        The start is by `time.monotonic`.
        """
        call = cluster.on_node(self._task, self._node, f"autoprof_collect_{name}", retries=2)
        return call.remote(name, *arguments), time.monotonic()

    def answer(self, call: tuple[Any, float]) -> Any:
        """Wait for the result of a call that `ask` started, and return the result.

        Raises:
            NodeLost: The node does not answer in time, or the deadline has passed.
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
            first_line = (str(error).strip().splitlines() or [""])[0]
            is_alive = any(node["NodeID"] == self._node and node["Alive"] for node in self._ray.nodes())
            problem = f"{type(error).__name__}: {first_line[:200]}" if is_alive else DIED
        raise NodeLost(problem)


DIED = "the node has died"


class File(NamedTuple):
    """A file on a node.

    Attributes:
        path: The path relative to the run directory on the node.
        size: The size in bytes.
        mtime_ns: The time of the last change, in nanoseconds since the epoch.
    """

    path: str
    size: Size
    mtime_ns: int


_MAX_DEPTH = 16
# Maximum length of a file name in bytes. File systems allow 255 bytes, but incomplete files have longer names.
_MAX_NAME_BYTES = 220


def is_safe(path: str) -> bool:
    """Return True if a path from another node stays in the run directory and is not the path of a temporary file."""
    parts = path.split("/")
    names = all(part not in ("", ".", "..") and len(os.fsencode(part)) <= _MAX_NAME_BYTES for part in parts)
    is_hidden = parts[0].startswith(".") or path.endswith(PART)
    return names and len(parts) <= _MAX_DEPTH and not is_hidden and "\0" not in path


# The ending of a file name. Readers rely on it, so the id of a node is put before it.
_ENDING = re.compile(r"_\d+_\d+_ascend_pt/|\.pt\.trace\.json\.gz\Z|\.meta\.json\Z|\.[a-z-]+\Z|\Z")


def path_for_node(path: str, node: str) -> str:
    """Return the path that a file of a node gets here if another file already has its path.

    Args:
        path: The path of the file on the node.
        node: Ray's id of the node.
    """
    return _ENDING.sub(lambda ending: f".node-{node[:12]}{ending[0]}", path, count=1)


class Index:
    """Index of the files in a run directory that came from other nodes.

    Attributes:
        nodes: Dict from the path of a file to Ray's id of the node that the file came from.
    """

    def __init__(self, run: Path) -> None:
        self._file = run / COLLECTING / f"index{LINES}"
        self.nodes: dict[str, str] = {}
        with contextlib.suppress(OSError):  # nothing has been collected yet
            for line in lines(self._file):
                with contextlib.suppress(ValueError, TypeError, RecursionError):  # the line is cut off
                    target, node = json.loads(line)
                    self.nodes[str(target)] = str(node)

    def target(self, node: str, path: str) -> str:
        """Return the path that a file of a node has, or gets, in the run directory here."""
        own_name = path_for_node(path, node)
        return own_name if self.nodes.get(own_name) == node else path

    def add(self, target: str, node: str) -> None:
        """Add a file to the index.

        Call this method before the file appears. Otherwise, another process could take it for a file of this node.

        Raises:
            OSError: The index can't be written.
        """
        if self.nodes.get(target) != node:
            # `json` is used because a path may contain any bytes, and msgspec refuses lone surrogates.
            files.append(self._file, json.dumps([target, node]).encode() + b"\n")
            self.nodes[target] = node


# Maximum size of one piece of a file, in bytes.
PIECE = 8 << 20
# Maximum number of pieces that one call asks for.
_MAX_PIECES = 512
# Maximum total size in bytes of the files for whose checksums one call asks. A single file may be larger.
_MAX_SUMMED_BYTES = 512 << 20
CHANGED = "it changed while it was read"
NOT_EQUAL = "the received bytes differ from the node's file (sha256)"


class Piece(NamedTuple):
    """A piece of a file of a node: `length` bytes from `offset` on."""

    file: File
    offset: int
    length: int

    @property
    def request(self) -> tuple[str, int, int, int, int]:
        """Return the piece in the form that `node_functions.read` takes.

        The time of the last change is 0 for a `.jsonl` file: processes only append to such a file, so it may grow.
        """
        path, size, mtime_ns = self.file
        return path, self.offset, self.length, size, 0 if path.endswith(LINES) else mtime_ns


class Fetcher:
    """Fetcher of files from one node into a run directory.

    Args:
        run: The run directory here.
        node: Ray's id of the node.
        directory: The run directory on the node.
        source: The node.
        index: The index of the run directory here.

    Attributes:
        progress: Callback that is called with a number of bytes when these bytes have been fetched or are already here.
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
        """Return the files of the node that are missing here, or that differ from the file here.

        If the two files have the same size, compare their sha256, unless the index shows that they are equal.

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
        """Return True if a file was fetched from this node before, and has changed neither here nor on the node."""
        target = self._index.target(self._node, file.path)
        if self._index.nodes.get(target) != self._node:
            return False
        status = files.status(self._run / target, follow=False)
        return status is not None and (status.st_size, status.st_mtime_ns) == (file.size, file.mtime_ns)

    def fetch(self, wanted: Sequence[File]) -> Iterator[tuple[File, str]]:
        """Fetch files. Yield each file with the problem, or with an empty text if there was no problem.

        Raises:
            NodeLost: The node does not answer.
            OSError: A file can't be written here, for example because the disk is full.
        """
        failed_files: set[File] = set()
        pieces = (
            Piece(file, offset, min(PIECE, file.size - offset))
            for file in wanted
            for offset in range(0, max(1, file.size), PIECE)
            if file not in failed_files
        )
        part = self._run / COLLECTING / f"{os.urandom(8).hex()}{PART}"
        try:
            for piece, (data, node_sum, problem) in self._answers("read", pieces, PIECE):
                file = piece.file
                if file in failed_files:
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
                    failed_files.add(file)
                yield file, problem
        finally:
            files.remove(str(part))

    def _answers(self, name: str, pieces: Iterable[Piece], max_bytes: int) -> Iterator[tuple[Piece, Any]]:
        """Yield each piece with the result that the node's function `name` returns for the piece.

        At most `MAX_PENDING` calls are pending at the same time.

        Args:
            name: The name of the function, `read` or `digest`.
            pieces: The parts of files to fetch or to check.
            max_bytes: The maximum total size of the pieces in one call.
        """
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
        """Give a fetched file its final name. Return the problem, or an empty text.

        Another file may already have this name, because processes of two containers may have the same host name and
        pid. In that case, keep both files. But if one file is the beginning of the other, both are copies of the same
        file: keep only the longer file.
        """
        target = self._index.target(self._node, file.path)
        path = self._run / target
        if self._index.nodes.get(target) != self._node and file.path != RUN and os.path.lexists(path):
            if not _begin_alike(part, path):
                target = path_for_node(file.path, self._node)
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
    """Yield groups of pieces. One call asks for all pieces of a group.

    The pieces of a group have at most `max_bytes` in total, unless a single piece is larger.
    """
    bundle: list[Piece] = []
    for piece in pieces:
        bundle_bytes = sum(earlier_piece.length for earlier_piece in bundle)
        if bundle and (bundle_bytes + piece.length > max_bytes or len(bundle) == _MAX_PIECES):
            yield bundle
            bundle = []
        bundle.append(piece)
    if bundle:
        yield bundle


def _problem(piece: Piece, data: bytes, node_sum: str, problem: str) -> str:
    """Return the problem of a received piece, or an empty text if the piece is correct.

    Args:
        piece: The requested part of a file.
        data: The received bytes.
        node_sum: The sha256 that the node computed.
        problem: The problem that the node reported, or an empty text.
    """
    if problem == "changed" or (not problem and len(data) != piece.length):
        return CHANGED
    if not problem and hashlib.sha256(data).hexdigest() != node_sum:
        return NOT_EQUAL
    return problem


def _size(path: Path) -> int:
    """Return the size of a file here in bytes, or -1 if the file does not exist."""
    status = files.status(path, follow=False)
    return -1 if status is None else status.st_size


def _sha256(path: Path) -> str:
    """Return the sha256 of a file here, or an empty text if the file can't be read."""
    sums = hashlib.sha256()
    try:
        with io.open(files.opened(path), "rb") as file:
            while block := file.read(1 << 20):
                sums.update(block)
    except OSError:
        return ""
    return sums.hexdigest()


def _begin_alike(first: Path, second: Path) -> bool:
    """Return True if one of two files is the beginning of the other. Return False if a file can't be read."""
    try:
        with io.open(files.opened(first), "rb") as one, io.open(files.opened(second), "rb") as other:
            while (block := one.read(1 << 20)) and (other_block := other.read(1 << 20)):
                length = min(len(block), len(other_block))
                if block[:length] != other_block[:length]:
                    return False
    except OSError:
        return False
    return True
