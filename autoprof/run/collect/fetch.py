"""Fetcher of files from one node: in pieces, resumable after a kill, verified before renaming."""

from __future__ import annotations

import contextlib
import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from autoprof.base import files
from autoprof.base.originals import io, os, threading, time
from autoprof.run import cluster
from autoprof.rundir.file_names import COLLECTING, LINES, PART

# Timeout for the answer of a node: Ray may have to start a worker there, and its disk may be slow.
_PATIENCE_S = 120.0
_POLL_S = 0.2
_TRIES = 3
# Number of calls of a node that are pending at a time.
MAX_PENDING = 3


class NodeLost(Exception):
    """A node does not answer. The message gives the reason."""


class TimeIsUp(NodeLost):
    """The time for all nodes together is used up."""


class RemoteCall(NamedTuple):
    """A pending call of a function on a node. `since` is its start by `time.monotonic`, in seconds."""

    name: str
    arguments: tuple[Any, ...]
    answer: Any
    since: float


class Source(Protocol):
    """A node that runs functions of `node_functions.py` on its part of the run."""

    def ask(self, name: str, *arguments: Any) -> RemoteCall:
        """Start a call of the function `name`."""

    def answer(self, call: RemoteCall) -> Any:
        """Wait for the result of a call.

        Raises:
            NodeLost: The node does not answer.
        """


def answers(source: Source, name: str, calls: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
    """Yield the results of calls of one function, in order. A few calls are pending at a time.

    Args:
        source: The node.
        name: The function.
        calls: The arguments of each call.

    Raises:
        NodeLost: The node does not answer.
    """
    pending: deque[RemoteCall] = deque()
    for arguments in calls:
        pending.append(source.ask(name, *arguments))
        if len(pending) == MAX_PENDING:
            yield source.answer(pending.popleft())
    while pending:
        yield source.answer(pending.popleft())


class Patience:
    """Time limit for all calls together. Setting the event `stop` ends it from another thread."""

    def __init__(self, seconds: float | None = None) -> None:
        self._until = None if seconds is None else time.monotonic() + seconds
        self.stop = threading.Event()

    @property
    def out(self) -> bool:
        return self.stop.is_set() or (self._until is not None and time.monotonic() > self._until)


class RayNode:
    """A node of the Ray cluster that this process is connected to."""

    def __init__(self, ray: Any, task: Any, node: str, patience: Patience) -> None:
        self._ray = ray
        self._task = task
        self._node = node
        self._patience = patience

    def ask(self, name: str, *arguments: Any) -> RemoteCall:
        call = cluster.on_node(self._task, self._node, f"autoprof_collect_{name}")
        return RemoteCall(name, arguments, call.remote(name, *arguments), time.monotonic())

    def answer(self, call: RemoteCall) -> Any:
        for tries in range(1, _TRIES + 1):
            try:
                # The time counts from the start of the call, so that several silent nodes share one wait.
                return self._wait(call.answer, call.since + _PATIENCE_S)
            except NodeLost:
                raise
            except Exception as error:  # an exception of Ray: a worker or the node has died
                if tries == _TRIES or not self._is_alive():
                    raise NodeLost(self._describe(error)) from None
                call = self.ask(call.name, *call.arguments)

    def _wait(self, reference: Any, deadline: float) -> Any:
        # Wait with short timeouts: Ray must not shut down while this thread waits in it.
        while not self._ray.wait([reference], timeout=_POLL_S)[0]:
            if self._patience.out:
                self._ray.cancel(reference)
                raise TimeIsUp("there was no time left")
            if time.monotonic() > deadline:
                self._ray.cancel(reference)
                raise NodeLost(f"no answer within {_PATIENCE_S:.0f} s")
        if self._patience.out:
            raise TimeIsUp("there was no time left")
        return self._ray.get(reference)

    def _is_alive(self) -> bool:
        return any(node["NodeID"] == self._node and node["Alive"] for node in self._ray.nodes())

    def _describe(self, error: Exception) -> str:
        first = (str(error).strip().splitlines() or [""])[0]
        return f"{type(error).__name__}: {first[:200]}" if self._is_alive() else DIED


DIED = "the node has died"


# Maximum size of a piece of files, in bytes.
PIECE = 8 << 20
# Maximum number of files in one piece or in one call for checksums.
_MAX_FILES = 512
# Number of bytes after which a call for checksums takes no further files.
_MAX_SUMMED_BYTES = 512 << 20
# A piece: its bytes, its sha256, and its problem or an empty text.
Piece = tuple[bytes, str, str]
CHANGED = "it changed while it was read"
NOT_EQUAL = "the received bytes differ from the node's file (sha256)"


class File(msgspec.Struct, frozen=True):
    """A file of a node.

    Attributes:
        path: Its path in the node's part of the run.
        size: Its size in bytes.
        mtime_ns: Its last change, in nanoseconds since the epoch.
        target: Its path in the run directory here.
    """

    path: str
    size: int
    mtime_ns: int
    target: str

    @property
    def grows(self) -> bool:
        """Return True if processes only append to the file, so that its present content stays valid."""
        return self.path.endswith(LINES)


class FetchedFile(msgspec.Struct, frozen=True):
    """The result for a file: its sha256, or the problem."""

    file: File
    sha256: str = ""
    problem: str = ""


class Fetcher:
    """Fetcher of files from one node into a run directory.

    Attributes:
        node: Ray's id of the node.
        progress: Callback with the number of bytes that were added.
    """

    def __init__(self, run: Path, node: str, directory: str, source: Source, progress: Callable[[int], object]) -> None:
        self._run = run
        self.node = node
        self._directory = directory
        self._source = source
        self.progress = progress

    def fetch(self, files: Sequence[File]) -> Iterator[FetchedFile]:
        """Fetch files. Replace files that were fetched before.

        Raises:
            NodeLost: The node does not answer.
            OSError: A file can't be written here, for example because the disk is full.
        """
        small = [file for file in files if file.size <= PIECE]
        for bundle, pieces in zip(bundles(small), self._pieces(bundles(small)), strict=True):
            for file, piece in zip(bundle, pieces, strict=True):
                data, problem = _checked(piece, file.size)
                yield self._small(file, data) if not problem else FetchedFile(file, problem=problem)
        for file in files:
            if file.size > PIECE:
                yield self._large(file)

    def digests(self, wanted: Sequence[tuple[str, int]]) -> list[str]:
        """Return the sha256 of the first bytes of the node's files.

        Args:
            wanted: The path of each file and its number of bytes.

        Raises:
            NodeLost: The node does not answer.
        """
        sums: list[str] = []
        bundle: list[tuple[str, int]] = []
        for path, size in wanted:
            bundle.append((path, size))
            if len(bundle) == _MAX_FILES or sum(bytes_of_file for _, bytes_of_file in bundle) > _MAX_SUMMED_BYTES:
                sums += self._digest(bundle)
                bundle = []
        return sums + self._digest(bundle)

    def _digest(self, bundle: list[tuple[str, int]]) -> list[str]:
        sums: list[str] = []
        if bundle:
            sums = self._source.answer(self._source.ask("digest", self._directory, bundle))
        return sums

    def _pieces(self, file_bundles: Iterator[list[File]]) -> Iterator[list[Piece]]:
        calls = ((self._directory, [_request(file, 0, file.size) for file in bundle]) for bundle in file_bundles)
        return answers(self._source, "read", calls)

    def _small(self, file: File, data: bytes) -> FetchedFile:
        return self._place(file, lambda path: files.write(path, data), hashlib.sha256(data).hexdigest())

    def _large(self, file: File) -> FetchedFile:
        part = self._run / COLLECTING / f"{self._key(file)}{PART}"
        # Try again from the start if resuming fails: the part of an earlier attempt may be damaged by a power loss.
        for resuming in (True, False):
            if not resuming:
                files.remove(str(part))
            size = part.stat().st_size if part.exists() else 0
            sums = _hashed(part, size) if 0 < size <= file.size else None
            if sums is None:
                os.close(files.create(part))
                size, sums = 0, hashlib.sha256()
            self.progress(size)
            problem = self._append(file, part, size, sums)
            if problem:
                files.remove(str(part))
                return FetchedFile(file, problem=problem)
            (node_sum,) = self.digests([(file.path, file.size)])
            if node_sum == sums.hexdigest():
                return self._place(file, lambda path: os.replace(part, path), node_sum)
            if not resuming or size == 0:
                break
        files.remove(str(part))
        return FetchedFile(file, problem=NOT_EQUAL if node_sum and not file.grows else CHANGED)

    def _append(self, file: File, part: Path, begin: int, sums: Any) -> str:
        """Append the bytes of a file from `begin` on, piece by piece. Return the problem, or an empty text."""
        offsets = range(begin, file.size, PIECE)
        lengths = {offset: min(PIECE, file.size - offset) for offset in offsets}
        calls = ((self._directory, [_request(file, offset, length)]) for offset, length in lengths.items())
        for offset, pieces in zip(offsets, answers(self._source, "read", calls), strict=True):
            (piece,) = pieces
            data, problem = _checked(piece, lengths[offset])
            if problem:
                return problem
            files.append(part, data)
            sums.update(data)
            self.progress(len(data))
        return ""

    def _place(self, file: File, put: Callable[[Path], object], sha256: str) -> FetchedFile:
        path = self._run / file.target
        try:
            for parent in reversed(Path(file.target).parents[:-1]):
                files.folder(self._run / parent)
            put(path)
            # Keep the time of the last change, because reports use it.
            os.utime(path, ns=(file.mtime_ns, file.mtime_ns), follow_symlinks=False)
        except FileExistsError:
            return FetchedFile(file, problem=f"{path.parent} exists and is not a folder")
        except IsADirectoryError:
            return FetchedFile(file, problem=f"{path} is a folder")
        if file.size <= PIECE:
            self.progress(file.size)
        return FetchedFile(file, sha256)

    def _key(self, file: File) -> str:
        """Return the name of a file's part. It depends on the node and on the state of the file."""
        text = "\0".join([self.node, file.path, *([] if file.grows else [str(file.size), str(file.mtime_ns)])])
        return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:32]


def bundles(files: Sequence[File]) -> Iterator[list[File]]:
    """Yield groups of files that together make one piece."""
    bundle: list[File] = []
    room = PIECE
    for file in files:
        if bundle and (file.size > room or len(bundle) == _MAX_FILES):
            yield bundle
            bundle, room = [], PIECE
        bundle.append(file)
        room -= file.size
    if bundle:
        yield bundle


def sha256(path: Path, size: int) -> str:
    """Return the sha256 of the first `size` bytes of a local file, or an empty text if it is shorter or unreadable."""
    with contextlib.suppress(OSError):
        if sums := _hashed(path, size):
            return str(sums.hexdigest())
    return ""


def _hashed(path: Path, size: int) -> Any:
    sums = hashlib.sha256()
    with io.open(files.opened(path), "rb") as file:
        while size and (piece := file.read(min(size, 1 << 20))):
            sums.update(piece)
            size -= len(piece)
    return sums if size == 0 else None


def _checked(piece: Piece, length: int) -> tuple[bytes, str]:
    """Return the bytes of a piece and its problem, or an empty text if it is correct."""
    data, node_sum, problem = piece
    if problem == "changed" or (not problem and len(data) != length):
        return b"", CHANGED
    if not problem and hashlib.sha256(data).hexdigest() != node_sum:
        return b"", NOT_EQUAL
    return data, problem


def _request(file: File, offset: int, length: int) -> tuple[str, int, int, int, int]:
    return file.path, offset, length, file.size, 0 if file.grows else file.mtime_ns
