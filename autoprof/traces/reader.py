"""Reader of a Chrome trace in pieces of whole events. The needed memory does not grow with the file.

Braces alone do not show where an event ends, because names and arguments contain braces too. So the reader guesses the
end of an event, and the JSON decoder confirms or rejects the guess.
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
from typing import BinaryIO, TypeVar

import msgspec
from msgspec import Raw

_MAGIC = b"\x1f\x8b"
_READ_BYTES = 256 << 10
# A trace unpacks to 10 to 30 times its size. A file that exceeds both limits is an attempt to fill memory and disks.
_FREE_BYTES = 1 << 30
_MAX_RATIO = 300


class Gunzip:
    """Reader of a gzip file, which may consist of several members.

    `gzip.GzipFile` is not used: if the file ends early, `gzip.GzipFile` loses data that was already unpacked.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._engine = zlib.decompressobj(wbits=31)
        self._packed = b""
        self._ended = self._begun = False
        self._unpacked = 0

    def read(self, size: int, /) -> bytes:
        """Return `size` unpacked bytes, or fewer at the end of the readable data.

        Raises:
            OSError: The compressed data ends early, is damaged, or unpacks to more than the limits allow.
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
        """Return the number of compressed bytes that were read so far."""
        return self._file.tell()

    def close(self) -> None:
        self._file.close()


def unpacked(path: Path) -> Gunzip | BinaryIO:
    """Return a plain or gzip file, opened for reading. The caller reads unpacked bytes in both cases.

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


def check_name(name: str) -> None:
    """Check the name of an event that has no field `ph`.

    In traces of torch 2.11 with CUDA, two events without a duration have the text of further fields in their names:
    `Iteration Start: PyTorch Profiler", "ph": "i", "s": "g`, and `Record Window End` with the same end.

    Raises:
        ValueError: The name does not contain the field.
    """
    if '"ph": ' not in name:
        raise ValueError(f"{name[:40]!r} has no field `ph`")


# Number of bytes to read at a time. Larger pieces take longer, because they don't fit into the caches.
CHUNK_BYTES = 1 << 20
# Maximum size of one event, of the text before the events and of the text after the events.
_LIMIT_BYTES = 64 << 20
# Deepest nesting of lists and objects in an event.
_MAX_DEPTH = 100
# Maximum number of guessed ends that are decoded in one buffer, and of braces or brackets that are looked at for them.
_GUESSES, _BRACES = 4, 100
# Longest white space that is expected after the list of events.
_GAP_BYTES = 64
_BETWEEN = b" \t\r\n,"
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
# A bracket, a brace or a whole string. If the end of the buffer cuts a string, the match has no group 1.
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:(")|\\?\Z)|[\[\]{}]', re.DOTALL)
_LIST = re.compile(rb"\s*\[\s*[{\]]")
# Exceptions of a JSON decoder for invalid JSON, for invalid UTF-8 and for too deep nesting.
NO_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_object = msgspec.json.Decoder(dict[str, Raw])
_list = msgspec.json.Decoder(list[Raw])

T = TypeVar("T")


class TraceError(Exception):
    """A trace can't be used. The message names the file and the reason."""


class Reader:
    """Reader of one Chrome trace, plain or gzip: an object with a list of `traceEvents`, or a bare list.

    Attributes:
        path: The path of the trace.
        fields: The fields of the object other than the events, as undecoded JSON. Fields that the file has after the
            events are added once all events are read. For a bare list, `fields` is empty.
        cut: The reason why the end of a truncated trace is missing. Empty if nothing is missing.
    """

    def __init__(self, path: Path, chunk_bytes: int = CHUNK_BYTES, accept_truncated: bool = False) -> None:
        """Open a trace and read up to its first event.

        Args:
            path: The path of the trace.
            chunk_bytes: The number of bytes to read at a time.
            accept_truncated: True to accept a truncated trace: its readable events are read, and `cut` gets the reason.
                If False, a truncated trace raises TraceError.

        Raises:
            TraceError: The file can't be read, or is not a Chrome trace with a `traceEvents` list.
        """
        self.path = path
        self.fields: dict[str, Raw] = {}
        self.cut = ""
        self._partial = accept_truncated
        self._list_alone = False
        self._chunk_bytes = chunk_bytes
        try:
            self._file = unpacked(path)
        except OSError as error:
            raise TraceError(f"{path}: {error.strerror or error}") from None
        with contextlib.ExitStack() as unless_read:
            unless_read.callback(self.close)
            self._buffer = self._read_head()
            unless_read.pop_all()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    @property
    def place(self) -> int:
        """Return the number of bytes of the file that were read so far. For gzip, these are compressed bytes."""
        return self._file.tell()

    def chunks(self, decode: Callable[[bytes], list[T]]) -> Iterator[list[T]]:
        """Yield lists of some thousand decoded events each, in the order of the file.

        Args:
            decode: A function that decodes a JSON array of events into a list, such as the method of a
                `msgspec.json.Decoder`.

        Raises:
            TraceError: The file is truncated and `partial` is False, or `decode` rejects an event.
        """
        buffer = self._buffer
        ended = stuck = False
        while not ended:
            # If no event ended in the buffer, double the buffer. So all scans of a long event together take time in
            # proportion to the length of the event.
            new_bytes = self._read(len(buffer) if stuck else 0)
            buffer += new_bytes
            guess = _guess_end(buffer, decode) if not new_bytes else _guess_cut(buffer, decode)
            if guess is None:
                end_offset, ended, deep = _scan(buffer)
                stuck = not end_offset and not ended
                if stuck:
                    if deep:
                        self._note_missing(f"an event has more than {_MAX_DEPTH} nested lists or objects")
                        return
                    if not new_bytes:
                        if not (self._list_alone and not buffer.strip(_BETWEEN)):
                            self._note_missing("it ends in the middle of its events")
                        return
                    if len(buffer) > _LIMIT_BYTES:
                        self._note_missing(f"an event has more than {_LIMIT_BYTES >> 20} MB")
                        return
                    continue
                guess = self._decode(buffer[:end_offset], decode), end_offset
            else:
                ended, stuck = not new_bytes, False
            events, end_offset = guess
            buffer = buffer[end_offset:]
            if events:
                yield events
        self._read_tail(buffer)

    def _read(self, min_bytes: int = 0) -> bytes:
        try:
            return self._file.read(max(min_bytes, self._chunk_bytes))
        except OSError as error:
            self._note_missing(f"it can't be read to its end: {error.strerror or error}")
            return b""

    def _note_missing(self, reason: str) -> None:
        if not self._partial:
            raise TraceError(f"{self.path}: {reason}")
        self.cut = self.cut or reason

    def _read_head(self) -> bytes:
        buffer = b""
        while len(buffer) < _LIMIT_BYTES:
            new_bytes = self._read(len(buffer))
            buffer += new_bytes
            if _LIST.match(buffer):
                self._list_alone = True
                return buffer.lstrip()[1:]
            for match in islice(_EVENTS.finditer(buffer), _GUESSES):
                try:
                    self.fields = _object.decode(buffer[: match.end()] + b"]}")
                except NO_JSON:  # this `"traceEvents": [` is part of the text of another field
                    continue
                if "traceEvents" in self.fields:
                    return buffer[match.end() :]
            if not new_bytes:
                break
        reason = f"; {self.cut}" if self.cut else ""
        raise TraceError(f"{self.path}: not a Chrome trace: it has no list of traceEvents{reason}")

    def _read_tail(self, buffer: bytes) -> None:
        while len(buffer) < _LIMIT_BYTES and (new_bytes := self._read(len(buffer))):
            buffer += new_bytes
        try:
            if self._list_alone:
                _list.decode(b"[" + buffer)
            else:
                self.fields = _object.decode(b'{"traceEvents":[' + buffer) | self.fields
        except NO_JSON as error:
            self._note_missing(f"the text after the events is not valid JSON ({error})")

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
    """Return the events of the buffer that are certainly complete, and the offset of the end of the last such event.

    An event is certainly complete if another event follows. Return None if no guess is right.
    """
    brace_offset, guess_count = len(buffer), 0
    # Limit the search: for deeply nested braces, its time would be quadratic.
    for _ in range(_BRACES):
        brace_offset = buffer.rfind(b"{", 0, brace_offset)
        end_offset = buffer.rfind(b"}", 0, max(0, brace_offset)) + 1
        if not end_offset or guess_count == _GUESSES:
            break
        if buffer[end_offset:brace_offset].strip() == b",":
            guess_count += 1
            if (events := _attempt(buffer[:end_offset], decode)) is not None:
                return events, end_offset
    return None


def _guess_end(buffer: bytes, decode: Callable[[bytes], list[T]]) -> tuple[list[T], int] | None:
    """Return the last events of a trace, and the offset of the `]` after them. Return None if no guess is right."""
    bracket_offset, guess_count = len(buffer), 0
    for _ in range(_BRACES):
        bracket_offset = buffer.rfind(b"]", 0, bracket_offset)
        if bracket_offset < 0 or guess_count == _GUESSES:
            return None
        # A bracket in a name is usually followed by other text.
        if buffer[bracket_offset + 1 : bracket_offset + _GAP_BYTES].lstrip()[:1] in (b"", b",", b"}"):
            guess_count += 1
            if (events := _attempt(buffer[:bracket_offset], decode)) is not None:
                return events, bracket_offset
    return None


def _scan(buffer: bytes) -> tuple[int, bool, bool]:
    """Scan a buffer that begins with an event.

    Returns:
        Three values: the offset of the end of the last whole event, or 0 if no event is whole; True if the list of
        events ends at this offset; True if an event nests deeper than `_MAX_DEPTH`.
    """
    depth = end_offset = 0
    for token in _TOKEN.finditer(buffer):
        first_byte = buffer[token.start()]
        if first_byte in b"{[":
            depth += 1
            if depth > _MAX_DEPTH:
                return end_offset, False, True
        elif first_byte in b"}]":
            depth -= 1
            if depth < 0:
                return token.start(), True, False
            if depth == 0:
                end_offset = token.end()
        elif token[1] is None:
            break
    return end_offset, False, False
