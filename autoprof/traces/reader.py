"""Reader of a Chrome trace in pieces of whole events, in memory that does not grow with the file.

Braces alone do not show where an event ends, because names and arguments contain braces too. The reader guesses an end;
the JSON decoder confirms or rejects it.
"""

from __future__ import annotations

import contextlib
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
# A trace unpacks to 10 to 30 times its size. A file that exceeds both limits is an attempt to fill memory and disks.
_FREE_BYTES = 1 << 30
_MAX_RATIO = 300


class Bytes(Protocol):
    """A source of bytes in pieces."""

    def read(self, size: int, /) -> bytes: ...

    def tell(self) -> int: ...

    def close(self) -> None: ...


class Gunzip:
    """Reader of gzip, also of several members. `gzip.GzipFile` would lose unpacked data at a premature end."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._engine = zlib.decompressobj(wbits=31)
        self._packed = b""
        self._ended = self._begun = False
        self._unpacked = 0

    def read(self, size: int, /) -> bytes:
        """Return `size` bytes, or fewer at the end of the readable data.

        Raises:
            OSError: No more data can be read, but the file has not ended.
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
                # Tapes and some disks pad the last member with nulls.
                self._packed = self._engine.unused_data.lstrip(b"\0")
                self._engine = zlib.decompressobj(wbits=31)
                self._begun = False
            pieces.append(piece)
            size -= len(piece)
            self._unpacked += len(piece)
            if self._unpacked > max(_FREE_BYTES, _MAX_RATIO * self._file.tell()):
                self._ended = True
                raise OSError(f"it unpacks to more than {_MAX_RATIO} times its size")
        return b"".join(pieces)

    def tell(self) -> int:
        """Return the number of compressed bytes that are read."""
        return self._file.tell()

    def close(self) -> None:
        self._file.close()


def unpacked(path: Path) -> Bytes:
    """Open a file, compressed or not.

    Raises:
        OSError: The file can't be opened, or is not a regular file.
    """
    # Open non-blocking: a FIFO must not hang the reader.
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    compressed = file.read(2) == _MAGIC
    file.seek(0)
    return Gunzip(file) if compressed else file


# Larger pieces take longer, because they don't fit into the caches.
CHUNK_BYTES = 1 << 20
# Largest event, and largest text around the events.
_LIMIT_BYTES = 64 << 20
# Deepest nesting of lists and objects in an event.
_MAX_DEPTH = 100
# Guessed ends that are decoded, and braces that are searched for guesses.
_GUESSES, _BRACES = 4, 100
# Longest white space behind the list of events.
_GAP_BYTES = 64
_BETWEEN = b" \t\r\n,"
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
# A bracket or a whole string. A string that the buffer's end cuts has no group 1.
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:(")|\\?\Z)|[\[\]{}]', re.DOTALL)
_LIST = re.compile(rb"\s*\[\s*[{\]]")
# Errors of a decoder: for invalid JSON, invalid UTF-8 and endless nesting.
NO_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_object = msgspec.json.Decoder(dict[str, Raw])
_list = msgspec.json.Decoder(list[Raw])

T = TypeVar("T")


class TraceError(Exception):
    """A trace can't be used. The message has the file and the reason."""


class Reader:
    """Reader of one Chrome trace, plain or gzip: an object with a list of `traceEvents`, or a bare list.

    Attributes:
        path: The file.
        fields: The other fields of the object. Fields after the events are known only once all events are read.
        cut: A description of the missing end of a truncated trace; empty if nothing is missing.
    """

    def __init__(self, path: Path, chunk_bytes: int = CHUNK_BYTES, partial: bool = False) -> None:
        """Open a trace and read up to its first event.

        Args:
            path: The file.
            chunk_bytes: The number of bytes to read at a time.
            partial: True to read a truncated trace up to its end.

        Raises:
            TraceError: The file can't be read, or is not a Chrome trace with a `traceEvents` list.
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
        with contextlib.ExitStack() as unless_read:
            unless_read.callback(self.close)
            self._buffer = self._read_head()
            unless_read.pop_all()

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
        """Return the number of bytes of the file that are read."""
        return self._file.tell()

    def chunks(self, decode: Callable[[bytes], list[T]]) -> Iterator[list[T]]:
        """Yield the events, in lists of some thousands.

        Args:
            decode: A function from a JSON array to a list, such as the method of a `msgspec.json.Decoder`.

        Raises:
            TraceError: The file is truncated and `partial` is False, or `decode` rejects an event.
        """
        buffer = self._buffer
        ended = stuck = False
        while not ended:
            # If no event ended, double the buffer, so that scanning it again costs at most twice its size.
            more = self._read(len(buffer) if stuck else 0)
            buffer += more
            guess = _guess_end(buffer, decode) if not more else _guess_cut(buffer, decode)
            if guess is None:
                cut, ended, deep = _scan(buffer)
                stuck = not cut and not ended
                if stuck:
                    if deep:
                        self._miss(f"an event has more than {_MAX_DEPTH} nested lists or objects")
                        return
                    if not more:
                        if not (self._list_alone and not buffer.strip(_BETWEEN)):
                            self._miss("it ends in the middle of its events")
                        return
                    if len(buffer) > _LIMIT_BYTES:
                        self._miss(f"an event has more than {_LIMIT_BYTES >> 20} MB")
                        return
                    continue
                guess = self._decode(buffer[:cut], decode), cut
            else:
                ended, stuck = not more, False
            events, cut = guess
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
            for match in islice(_EVENTS.finditer(buffer), _GUESSES):
                try:
                    self.fields = _object.decode(buffer[: match.end()] + b"]}")
                except NO_JSON:  # the words are part of another field
                    continue
                if "traceEvents" in self.fields:
                    return buffer[match.end() :]
            if not more:
                break
        reason = f"; {self.cut}" if self.cut else ""
        raise TraceError(f"{self.path}: not a Chrome trace: it has no list of traceEvents{reason}")

    def _read_tail(self, buffer: bytes) -> None:
        while len(buffer) < _LIMIT_BYTES and (more := self._read(len(buffer))):
            buffer += more
        try:
            if self._list_alone:
                _list.decode(b"[" + buffer)
            else:
                self.fields = _object.decode(b'{"traceEvents":[' + buffer) | self.fields
        except NO_JSON as error:
            self._miss(f"the text after the events is not valid JSON ({error})")

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
    """Return the events up to the last one with a successor, and the offset of their end."""
    place, guesses = len(buffer), 0
    # Limit the search: with endless nested braces it would be quadratic.
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
    """Return the last events of a trace, and the offset of their list's end."""
    place, guesses = len(buffer), 0
    for _ in range(_BRACES):
        place = buffer.rfind(b"]", 0, place)
        if place < 0 or guesses == _GUESSES:
            return None
        # A bracket in a name is usually followed by other text.
        if buffer[place + 1 : place + _GAP_BYTES].lstrip()[:1] in (b"", b",", b"}"):
            guesses += 1
            if (events := _attempt(buffer[:place], decode)) is not None:
                return events, place
    return None


def _scan(buffer: bytes) -> tuple[int, bool, bool]:
    """Return the end of the last whole event or 0, if the list ends there, and if the next event nests too deep."""
    depth = cut = 0
    for token in _TOKEN.finditer(buffer):
        first = buffer[token.start()]
        if first in b"{[":
            depth += 1
            if depth > _MAX_DEPTH:
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
