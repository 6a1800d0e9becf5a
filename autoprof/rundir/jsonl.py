"""Streaming reader of JSON Lines files: timelines and clock offsets."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from autoprof.base import files
from autoprof.base.originals import io

_CHUNK_BYTES = 1 << 20
# Longer than any line that autoprof writes.
_MAX_LINE_BYTES = 1 << 20


def lines(
    path: Path, part: Callable[[int], object] | None = None, parts: Sequence[tuple[int, int]] | None = None
) -> Iterator[bytes | None]:
    """Yield the lines of a file without line ends; None in place of a line over 1 MiB. The last line may be cut off.

    Args:
        path: The file.
        part: Callback before each part of about 1 MB is read: the offset of its first line, in bytes.
        parts: Start and end offsets of the parts to read, from earlier calls of `part`; None for the whole file.

    Raises:
        OSError: The path is not a file, or cannot be read to its end.
    """
    with io.open(files.opened(path), "rb") as file:
        for begin, end in parts if parts is not None else ((0, sys.maxsize),):
            file.seek(begin)
            yield from _lines(file, begin, end, part or _ignore)


def _lines(file: BinaryIO, at: int, end: int, part: Callable[[int], object]) -> Iterator[bytes | None]:
    rest, too_long = b"", False
    while chunk := file.read(min(_CHUNK_BYTES, end - at)):
        part(at - len(rest))
        at += len(chunk)
        *whole, rest = (rest + chunk).split(b"\n")
        if too_long and whole:
            whole, too_long = whole[1:], False
        yield from whole
        if len(rest) > _MAX_LINE_BYTES:
            if not too_long:
                yield None
            rest, too_long = b"", True
    # A line without an end: a process is still writing it, or was killed.
    if rest and not too_long:
        yield rest


def _ignore(_: int) -> None:
    """Do nothing: the caller needs no offsets."""
