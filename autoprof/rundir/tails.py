"""Ends of timeline files: their last lines, in which readers look for what is open."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import msgspec

from autoprof.base import files, interrupts
from autoprof.base.originals import io, os
from autoprof.rundir.records import BegunLine, DroppedLine, ExitLine, Line, MemoryLine, ProcessLine, RaisedLine

# Twice as far back as a process writes again what is open (`run/timeline.py`), and some seconds of a busy process.
_TAIL_BYTES = 4 << 20
# No line is longer that tells whether a process has ended.
_LINE_BYTES = 32 << 10

AnyLine: TypeAlias = ProcessLine | BegunLine | DroppedLine | ExitLine | RaisedLine | MemoryLine
_open_lines = msgspec.json.Decoder(AnyLine)
_spans = msgspec.json.Decoder(Line)
# How lines begin that are no spans.
_TAGGED = tuple(f'{{"kind":"{kind}"'.encode() for kind in ("process", "begun", "dropped", "exit", "raised", "memory"))


def lines(path: Path) -> Iterator[AnyLine | Line]:
    """Yield the last lines of a file, and its first one.

    Raises:
        OSError: It can't be read.
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
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:  # cut off, or of a newer autoprof
            interrupts.pass_on(error)
            continue


def first_and_last(path: Path) -> tuple[AnyLine | None, AnyLine | None] | None:
    """Return the first and the last line of a file, None for those that are spans; None for what can't be decoded.

    Raises:
        OSError: It can't be read.
    """
    with io.open(files.opened(path), "rb") as file:
        first = file.readline(_LINE_BYTES)
        file.seek(max(0, file.seek(0, os.SEEK_END) - _LINE_BYTES))
        last = file.read().rstrip(b"\n").rpartition(b"\n")[2]
    try:
        begun, ended = (_open_lines.decode(line) if line.startswith(_TAGGED) else None for line in (first, last))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        interrupts.pass_on(error)
        return None
    return begun, ended


def spans(path: Path) -> Iterator[Line]:
    """Yield the last spans of a timeline file that have ended. One that can't be read has none."""
    try:
        yield from (line for line in lines(path) if isinstance(line, Line))
    except OSError as error:
        interrupts.pass_on(error)
