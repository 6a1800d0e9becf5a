"""Reads files of lines that a run's processes write, as streams: timelines, and what was measured of clocks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, TypeAlias

from msgspec import Meta

from autoprof import _files

_CHUNK_BYTES = 1 << 20
# No line that autoprof writes is longer.
_LINE_BYTES = 1 << 20

# Nanoseconds up to the year 2116, and whole numbers that any reader of JSON has as they are.
Ns: TypeAlias = Annotated[int, Meta(ge=-(1 << 62), le=1 << 62)]
Number: TypeAlias = Annotated[int, Meta(ge=-(1 << 53), le=1 << 53)]


def lines(path: Path) -> Iterator[bytes | None]:
    """The lines of a file, without their ends; None in place of one that is too long. The last one may be cut off.

    Raises:
        OSError: It can't be read (to its end), or is no file.
    """
    with os.fdopen(_files.opened(path), "rb") as file:
        rest, too_long = b"", False
        while chunk := file.read(_CHUNK_BYTES):
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
