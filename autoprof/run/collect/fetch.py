"""Fetcher of files from one node: in pieces, into partial files that survive a kill, verified before renaming."""

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
from autoprof.run.collect.node import functions
from autoprof.rundir.file_names import COLLECTING, LINES, PART

# How long a node has for an answer: Ray may have to start a worker there, and a disk may be slow.
_PATIENCE_S = 120.0
_LOOK_S = 0.2
_TRIES = 3
# So many pieces are on their way at a time.
AT_A_TIME = 3


class Lost(Exception):
    """A node does not answer (any more). The message says why."""


class Out(Lost):
    """There is no time left to wait for any node."""


class Asked(NamedTuple):
    """A question that is on its way since a moment (`time.monotonic`)."""

    name: str
    arguments: tuple[Any, ...]
    answer: Any
    since: float


class Source(Protocol):
    """A node's part of the run, from which the functions of `remote` read."""

    def ask(self, name: str, *arguments: Any) -> Asked:
        """Send a question."""

    def answer(self, asked: Asked) -> Any:
        """Wait for the answer.

        Raises:
            Lost: There is none.
        """


def answers(source: Source, name: str, questions: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
    """Yield the answers to questions of one kind, in order, with a few of them on their way at a time.

    Raises:
        Lost: There is none to one of them.
    """
    under_way: deque[Asked] = deque()
    for arguments in questions:
        under_way.append(source.ask(name, *arguments))
        if len(under_way) == AT_A_TIME:
            yield source.answer(under_way.popleft())
    while under_way:
        yield source.answer(under_way.popleft())


class Patience:
    """The time that all questions may take together. `stop` ends it from another thread."""

    def __init__(self, seconds: float | None = None) -> None:
        self._until = None if seconds is None else time.monotonic() + seconds
        self.stop = threading.Event()

    @property
    def out(self) -> bool:
        return self.stop.is_set() or (self._until is not None and time.monotonic() > self._until)


class OnRay:
    """Asks one node of a cluster that this process is connected to."""

    def __init__(self, ray: Any, node: str, patience: Patience) -> None:
        self._ray = ray
        self._node = node
        self._patience = patience
        self._functions = {
            name: cluster.on_node(ray.remote(function), node, f"autoprof_collect_{name}")
            for name, function in functions().items()
        }

    def ask(self, name: str, *arguments: Any) -> Asked:
        return Asked(name, arguments, self._functions[name].remote(*arguments), time.monotonic())

    def answer(self, asked: Asked) -> Any:
        for tries in range(1, _TRIES + 1):
            try:
                # Several nodes that don't answer are waited for together.
                return self._wait(asked.answer, asked.since + _PATIENCE_S)
            except Lost:
                raise
            except Exception as error:  # Ray's own, of a worker or a node that died
                if tries == _TRIES or not self._alive():
                    raise Lost(self._why(error)) from None
                asked = self.ask(asked.name, *asked.arguments)

    def _wait(self, reference: Any, deadline: float) -> Any:
        # In short waits: the end of Ray must not find a thread in one.
        while not self._ray.wait([reference], timeout=_LOOK_S)[0]:
            if self._patience.out:
                self._ray.cancel(reference)
                raise Out("there was no time left")
            if time.monotonic() > deadline:
                self._ray.cancel(reference)
                raise Lost(f"no answer within {_PATIENCE_S:.0f} s")
        if self._patience.out:
            raise Out("there was no time left")
        return self._ray.get(reference)

    def _alive(self) -> bool:
        return any(node["NodeID"] == self._node and node["Alive"] for node in self._ray.nodes())

    def _why(self, error: Exception) -> str:
        first = (str(error).strip().splitlines() or [""])[0]
        return f"{type(error).__name__}: {first[:200]}" if self._alive() else DIED


DIED = "the node has died"


PIECE = 8 << 20
# No more files than these in one piece.
_FILES = 512
# So many bytes are summed up in one answer.
_SUMMED = 512 << 20
# A piece, its sha256, and what is wrong with it.
Piece = tuple[bytes, str, str]
CHANGED = "it changed while it was read"
NOT_EQUAL = "what came is not what the node has (sha256)"


class File(msgspec.Struct, frozen=True):
    """A file of a node: where it lies there, its bytes, when it was written to, and where it goes here."""

    path: str
    size: int
    mtime_ns: int
    target: str

    @property
    def grows(self) -> bool:
        """Return whether processes append to it: its content so far stays."""
        return self.path.endswith(LINES)


class Got(msgspec.Struct, frozen=True):
    """The result for a file: its sha256, or what is wrong."""

    file: File
    sha256: str = ""
    problem: str = ""


class Fetcher:
    """Brings files of one node into a run directory.

    Attributes:
        node: Ray's id of it.
        progress: Is told how many more bytes are there.
    """

    def __init__(self, run: Path, node: str, directory: str, source: Source, progress: Callable[[int], object]) -> None:
        self._run = run
        self.node = node
        self._directory = directory
        self._source = source
        self.progress = progress

    def fetch(self, files: Sequence[File]) -> Iterator[Got]:
        """Fetch files; those that were fetched before are replaced.

        Raises:
            Lost: The node does not answer any more.
            OSError: The disk here is full.
        """
        small = [file for file in files if file.size <= PIECE]
        for bundle, pieces in zip(bundles(small), self._pieces(bundles(small)), strict=True):
            for file, piece in zip(bundle, pieces, strict=True):
                data, problem = _checked(piece, file.size)
                yield self._whole(file, data) if not problem else Got(file, problem=problem)
        for file in files:
            if file.size > PIECE:
                yield self._large(file)

    def digests(self, wanted: Sequence[tuple[str, int]]) -> list[str]:
        """Return sha256 of the first bytes of files as the node has them, each by its path and how many.

        Raises:
            Lost: The node does not answer any more.
        """
        found: list[str] = []
        bundle: list[tuple[str, int]] = []
        for path, size in wanted:
            bundle.append((path, size))
            if len(bundle) == _FILES or sum(each for _, each in bundle) > _SUMMED:
                found += self._summed(bundle)
                bundle = []
        return found + self._summed(bundle)

    def _summed(self, bundle: list[tuple[str, int]]) -> list[str]:
        found: list[str] = []
        if bundle:
            found = self._source.answer(self._source.ask("digest", self._directory, bundle))
        return found

    def _pieces(self, found: Iterator[list[File]]) -> Iterator[list[Piece]]:
        asked = ((self._directory, [_wanted(file, 0, file.size) for file in bundle]) for bundle in found)
        return answers(self._source, "read", asked)

    def _whole(self, file: File, data: bytes) -> Got:
        return self._placed(file, lambda place: files.write(place, data), hashlib.sha256(data).hexdigest())

    def _large(self, file: File) -> Got:
        part = self._run / COLLECTING / f"{self._key(file)}{PART}"
        # What an earlier attempt left may be of a disk that lost power.
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
                return Got(file, problem=problem)
            (theirs,) = self.digests([(file.path, file.size)])
            if theirs == sums.hexdigest():
                return self._placed(file, lambda place: os.replace(part, place), theirs)
            if not resuming or size == 0:
                break
        files.remove(str(part))
        return Got(file, problem=NOT_EQUAL if theirs and not file.grows else CHANGED)

    def _append(self, file: File, part: Path, begin: int, sums: Any) -> str:
        """Add what lacks of a file, piece by piece; returns what is wrong."""
        offsets = range(begin, file.size, PIECE)
        lengths = {offset: min(PIECE, file.size - offset) for offset in offsets}
        asked = ((self._directory, [_wanted(file, offset, length)]) for offset, length in lengths.items())
        for offset, pieces in zip(offsets, answers(self._source, "read", asked), strict=True):
            (piece,) = pieces
            data, problem = _checked(piece, lengths[offset])
            if problem:
                return problem
            files.append(part, data)
            sums.update(data)
            self.progress(len(data))
        return ""

    def _placed(self, file: File, put: Callable[[Path], object], sha256: str) -> Got:
        place = self._run / file.target
        try:
            for above in reversed(Path(file.target).parents[:-1]):
                files.folder(self._run / above)
            put(place)
            # Reports look at when a run's files were written.
            os.utime(place, ns=(file.mtime_ns, file.mtime_ns), follow_symlinks=False)
        except FileExistsError:
            return Got(file, problem=f"there is something else in the place of {place.parent}")
        except IsADirectoryError:
            return Got(file, problem=f"there is a folder in the place of {place}")
        if file.size <= PIECE:
            self.progress(file.size)
        return Got(file, sha256)

    def _key(self, file: File) -> str:
        """Return the name of a file's part: another state of the file, or another node, has another."""
        told = "\0".join([self.node, file.path, *([] if file.grows else [str(file.size), str(file.mtime_ns)])])
        return hashlib.sha256(told.encode(errors="surrogatepass")).hexdigest()[:32]


def bundles(files: Sequence[File]) -> Iterator[list[File]]:
    """Yield files that make a piece together."""
    bundle: list[File] = []
    room = PIECE
    for file in files:
        if bundle and (file.size > room or len(bundle) == _FILES):
            yield bundle
            bundle, room = [], PIECE
        bundle.append(file)
        room -= file.size
    if bundle:
        yield bundle


def sha256(path: Path, size: int) -> str:
    """Return sha256 of the first bytes of a file here; an empty text where there are fewer, or it can't be read."""
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
    """Return what came of a piece, and what is wrong with it."""
    data, theirs, problem = piece
    if problem == "changed" or (not problem and len(data) != length):
        return b"", CHANGED
    if not problem and hashlib.sha256(data).hexdigest() != theirs:
        return b"", NOT_EQUAL
    return data, problem


def _wanted(file: File, offset: int, length: int) -> tuple[str, int, int, int, int]:
    return file.path, offset, length, file.size, 0 if file.grows else file.mtime_ns
