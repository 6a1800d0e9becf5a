"""Reader of a Chrome trace in pieces of whole events, in memory that does not grow with the file.

Braces alone do not show where an event ends, because names and arguments contain braces too. The reader tries a likely
place; the JSON decoder decides whether it was right.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Protocol, TypeVar

import msgspec
from msgspec import Raw

_MAGIC = b"\x1f\x8b"
_READ_BYTES = 256 << 10
# Traces unpack to ten times their size or thirty. What goes beyond both of these is made to fill memory and disks.
_FREE_BYTES = 1 << 30
_MOST_TIMES = 300


class Bytes(Protocol):
    """A source of bytes in pieces."""

    def read(self, size: int, /) -> bytes: ...

    def tell(self) -> int: ...

    def close(self) -> None: ...


class Gunzip:
    """Reads gzip, of several members too. `gzip.GzipFile` loses what it had unpacked when it meets the end."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._engine = zlib.decompressobj(wbits=31)
        self._packed = b""
        self._ended = self._begun = False
        self._unpacked = 0

    def read(self, size: int, /) -> bytes:
        """Return at most `size` bytes, fewer only where the file or what can be read of it ends.

        Raises:
            OSError: Nothing more can be read, and the file's end is not reached.
        """
        pieces: list[bytes] = []
        while size > 0 and not self._ended:
            if not self._packed:
                self._packed = self._file.read(_READ_BYTES)
                if not self._packed:
                    if self._begun and pieces:
                        break
                    self._ended = True
                    if self._begun:
                        raise OSError("the compressed data ends early")
                    break
            try:
                piece = self._engine.decompress(self._packed, size)
            except zlib.error as error:
                if pieces:
                    break
                self._ended = True
                raise OSError(f"the compressed data is damaged ({error})") from None
            self._begun = True
            self._packed = self._engine.unconsumed_tail
            if self._engine.eof:
                # Nulls may follow the last member: tapes and some disks pad with them.
                self._packed = self._engine.unused_data.lstrip(b"\0")
                self._engine = zlib.decompressobj(wbits=31)
                self._begun = False
            pieces.append(piece)
            size -= len(piece)
            self._unpacked += len(piece)
            if self._unpacked > max(_FREE_BYTES, _MOST_TIMES * self._file.tell()):
                self._ended = True
                raise OSError(f"it unpacks to more than {_MOST_TIMES} times its size")
        return b"".join(pieces)

    def tell(self) -> int:
        """Return how much of the file, as it lies there, is read."""
        return self._file.tell()

    def close(self) -> None:
        self._file.close()


def unpacked(path: Path) -> Bytes:
    """Open a file, compressed or not.

    Raises:
        OSError: It can't be opened.
    """
    # Nobody waits for what comes out of a pipe.
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is no file", str(path))
    compressed = file.read(2) == _MAGIC
    file.seek(0)
    return Gunzip(file) if compressed else file


# Larger pieces take longer: they do not fit into the caches.
CHUNK_BYTES = 1 << 20
# No event and nothing around the events is larger: what is, is no trace.
_LIMIT_BYTES = 64 << 20
# No event has more lists in lists, or objects.
_DEEPEST = 100
_GUESSES, _BRACES = 4, 100
_BETWEEN = b" \t\r\n,"
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
# A bracket or a whole string; a string that the buffer cuts has no group 1.
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:(")|\\?\Z)|[\[\]{}]', re.DOTALL)
_LIST = re.compile(rb"\s*\[\s*[{\]]")
# What a decoder raises: text that is no UTF-8 and lists in lists without end have errors of their own.
NO_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_object = msgspec.json.Decoder(dict[str, Raw])
_list = msgspec.json.Decoder(list[Raw])

T = TypeVar("T")


class TraceError(Exception):
    """A trace can't be used. The message names the file and says why."""


class Reader:
    """One Chrome trace, plain or gzip: an object with a list of `traceEvents`, or such a list alone.

    Attributes:
        fields: What stands beside the events: what comes before them at once, what comes after them at the end.
        cut: Where it turned out that the trace's end is missing, what is; else empty.
    """

    def __init__(self, path: Path, chunk_bytes: int = CHUNK_BYTES, partial: bool = False) -> None:
        """Open a trace and read up to its first event.

        Args:
            path: The file.
            chunk_bytes: How much is read at a time.
            partial: Whether a trace that is cut off is read up to there.

        Raises:
            TraceError: It can't be read, or is no Chrome trace with a `traceEvents` list.
        """
        self.path = path
        self.fields: dict[str, Raw] = {}
        self.cut = ""
        self._partial = partial
        self._list_alone = False
        self._chunk_bytes = chunk_bytes
        try:
            self._file: Bytes = unpacked(path)
        except OSError as error:
            raise TraceError(f"{path}: {error.strerror or error}") from None
        try:
            self._buffer = self._read_head()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    @property
    def place(self) -> int:
        """Return how many bytes of the file are read."""
        return self._file.tell()

    def chunks(self, decode: Callable[[bytes], list[T]]) -> Iterator[list[T]]:
        """Yield the events, in lists of some thousands.

        Args:
            decode: Makes a list of a JSON array, as the method of a `msgspec.json.Decoder` does.

        Raises:
            TraceError: The file ends early and that is not accepted, or an event is not what `decode` takes.
        """
        buffer = self._buffer
        ended = stuck = False
        while not ended:
            # As much again where no event ended: what is gone through again and again stays twice the whole.
            more = self._read(len(buffer) if stuck else 0)
            buffer += more
            found = _guess_end(buffer, decode) if not more else _guess_cut(buffer, decode)
            if found is None:
                cut, ended, deep = _scan(buffer)
                stuck = not cut and not ended
                if stuck:
                    if deep:
                        self._miss(f"an event has more than {_DEEPEST} lists or objects in one another")
                        return
                    if not more:
                        if not (self._list_alone and not buffer.strip(_BETWEEN)):
                            self._miss("it ends in the middle of its events")
                        return
                    if len(buffer) > _LIMIT_BYTES:
                        self._miss(f"an event has more than {_LIMIT_BYTES >> 20} MB")
                        return
                    continue
                found = self._decode(buffer[:cut], decode), cut
            else:
                ended, stuck = not more, False
            events, cut = found
            buffer = buffer[cut:]
            if events:
                yield events
        self._read_tail(buffer)

    def _read(self, least: int = 0) -> bytes:
        try:
            return self._file.read(max(least, self._chunk_bytes))
        except OSError as error:
            self._miss(f"it can't be read to its end: {error.strerror or error}")
            return b""

    def _miss(self, what: str) -> None:
        if not self._partial:
            raise TraceError(f"{self.path}: {what}")
        self.cut = self.cut or what

    def _read_head(self) -> bytes:
        buffer = b""
        while len(buffer) < _LIMIT_BYTES:
            more = self._read(len(buffer))
            buffer += more
            if _LIST.match(buffer):
                self._list_alone = True
                return buffer.lstrip()[1:]
            for found in islice(_EVENTS.finditer(buffer), _GUESSES):
                try:
                    self.fields = _object.decode(buffer[: found.end()] + b"]}")
                except NO_JSON:  # the words stand in something else
                    continue
                if "traceEvents" in self.fields:
                    return buffer[found.end() :]
            if not more:
                break
        why = f"; {self.cut}" if self.cut else ""
        raise TraceError(f"{self.path}: it is no Chrome trace: there is no list of traceEvents{why}")

    def _read_tail(self, buffer: bytes) -> None:
        while len(buffer) < _LIMIT_BYTES and (more := self._read(len(buffer))):
            buffer += more
        try:
            if self._list_alone:
                _list.decode(b"[" + buffer)
            else:
                self.fields = _object.decode(b'{"traceEvents":[' + buffer) | self.fields
        except NO_JSON as error:
            self._miss(f"what follows the events is not valid JSON ({error})")

    def _decode(self, body: bytes, decode: Callable[[bytes], list[T]]) -> list[T]:
        try:
            return decode(_array(body))
        except NO_JSON as error:
            raise TraceError(f"{self.path}: an event can't be read: {error}") from None


def _array(body: bytes) -> bytes:
    return b"[%b]" % body.strip(_BETWEEN)


def _attempt(body: bytes, decode: Callable[[bytes], list[T]]) -> list[T] | None:
    try:
        return decode(_array(body))
    except NO_JSON:
        return None


def _guess_cut(buffer: bytes, decode: Callable[[bytes], list[T]]) -> tuple[list[T], int] | None:
    """Return the events up to the last one that another follows, and where they end."""
    place, guesses = len(buffer), 0
    # Braces in braces without end would each be looked at from all those before.
    for _ in range(_BRACES):
        place = buffer.rfind(b"{", 0, place)
        cut = buffer.rfind(b"}", 0, max(0, place)) + 1
        if not cut or guesses == _GUESSES:
            break
        if buffer[cut:place].strip() == b",":
            guesses += 1
            if (events := _attempt(buffer[:cut], decode)) is not None:
                return events, cut
    return None


def _guess_end(buffer: bytes, decode: Callable[[bytes], list[T]]) -> tuple[list[T], int] | None:
    """Return the last events of a trace, and where their list is closed."""
    place = len(buffer)
    for _ in range(_GUESSES):
        place = buffer.rfind(b"]", 0, place)
        if place < 0:
            return None
        if (events := _attempt(buffer[:place], decode)) is not None:
            return events, place
    return None


def _scan(buffer: bytes) -> tuple[int, bool, bool]:
    """Return the end of the last whole event, or 0, whether the list of events ends there, and whether what follows is
    nested too deep."""
    depth = cut = 0
    for token in _TOKEN.finditer(buffer):
        first = buffer[token.start()]
        if first in b"{[":
            depth += 1
            if depth > _DEEPEST:
                return cut, False, True
        elif first in b"}]":
            depth -= 1
            if depth < 0:
                return token.start(), True, False
            if depth == 0:
                cut = token.end()
        elif token[1] is None:
            break
    return cut, False, False
