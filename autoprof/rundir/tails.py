"""Reader of the last lines of timeline files, which include all open spans."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import msgspec

from autoprof.base import files, interrupts
from autoprof.base.originals import io, os
from autoprof.rundir.records import BegunLine, DroppedLine, ExitLine, Line, MemoryLine, ProcessLine, RaisedLine

# A process writes its open spans again after each 1 MiB (`run/timeline.py`). The tail holds two such intervals, and the
# lines that a busy process writes in a few seconds.
_TAIL_BYTES = 4 << 20
# Longer than any process line or exit line.
_MAX_LINE_BYTES = 32 << 10

AnyLine: TypeAlias = ProcessLine | BegunLine | DroppedLine | ExitLine | RaisedLine | MemoryLine
_open_lines = msgspec.json.Decoder(AnyLine)
_spans = msgspec.json.Decoder(Line)
# First bytes of lines that are not spans.
_TAGGED = tuple(f'{{"kind":"{kind}"'.encode() for kind in ("process", "begun", "dropped", "exit", "raised", "memory"))


def lines(path: Path) -> Iterator[AnyLine | Line]:
    """Yield the first line of a file, then its last lines.

    Raises:
        OSError: The file can't be read.
    """
    with io.open(files.opened(path), "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        parts = [file.read(_TAIL_BYTES)]
        if size > _TAIL_BYTES:
            parts = [parts[0][: parts[0].find(b"\n")]]
            file.seek(size - _TAIL_BYTES)
            parts.append(file.read(_TAIL_BYTES).partition(b"\n")[2])
    for text in b"\n".join(parts).split(b"\n"):
        try:
            yield (_open_lines if text.startswith(_TAGGED) else _spans).decode(text)
        except (
            msgspec.DecodeError,
            UnicodeDecodeError,
            RecursionError,
        ) as error:  # the line is cut off, or from a newer autoprof
            interrupts.pass_on(error)
            continue


def first_and_last(path: Path) -> tuple[AnyLine | None, AnyLine | None] | None:
    """Return the first and the last line of a file, None in place of a span; None if one of them can't be decoded.

    Raises:
        OSError: The file can't be read.
    """
    with io.open(files.opened(path), "rb") as file:
        first = file.readline(_MAX_LINE_BYTES)
        file.seek(max(0, file.seek(0, os.SEEK_END) - _MAX_LINE_BYTES))
        last = file.read().rstrip(b"\n").rpartition(b"\n")[2]
    try:
        begun, ended = (_open_lines.decode(line) if line.startswith(_TAGGED) else None for line in (first, last))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        interrupts.pass_on(error)
        return None
    return begun, ended


def spans(path: Path) -> Iterator[Line]:
    """Yield the last ended spans of a timeline file; nothing if it can't be read."""
    try:
        yield from (line for line in lines(path) if isinstance(line, Line))
    except OSError as error:
        interrupts.pass_on(error)
