"""Streaming reader of files of lines: timelines and clock offsets."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from autoprof.base import files
from autoprof.base.originals import io

_CHUNK_BYTES = 1 << 20
# No line that autoprof writes is longer.
_LINE_BYTES = 1 << 20


def lines(
    path: Path, part: Callable[[int], object] | None = None, parts: Sequence[tuple[int, int]] | None = None
) -> Iterator[bytes | None]:
    """Yield the lines of a file without their ends, None in place of one that is too long. The last may be cut off.

    Args:
        path: The file.
        part: Told before each part of about 1 MB where its first line begins.
        parts: Begin and end of the only parts to read, as `part` was told of them.

    Raises:
        OSError: It can't be read (to its end), or is no file.
    """
    with io.open(files.opened(path), "rb") as file:
        for begin, end in parts if parts is not None else ((0, sys.maxsize),):
            file.seek(begin)
            yield from _lines(file, begin, end, part or _nobody)


def _lines(file: BinaryIO, at: int, end: int, part: Callable[[int], object]) -> Iterator[bytes | None]:
    rest, too_long = b"", False
    while chunk := file.read(min(_CHUNK_BYTES, end - at)):
        part(at - len(rest))
        at += len(chunk)
        *whole, rest = (rest + chunk).split(b"\n")
        if too_long and whole:
            whole, too_long = whole[1:], False
        yield from whole
        if len(rest) > _LINE_BYTES:
            if not too_long:
                yield None
            rest, too_long = b"", True
    # A process that writes has not ended its line yet, one that was killed never will.
    if rest and not too_long:
        yield rest


def _nobody(_: int) -> None:
    """Tell nobody."""
