"""Bytes of a file as they were before gzip, up to where a file that is cut off ends."""

from __future__ import annotations

import errno
import os
import stat
import zlib
from pathlib import Path
from typing import BinaryIO, Protocol

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
