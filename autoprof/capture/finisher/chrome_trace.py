"""Chrome traces as Kineto writes them: made JSON, cut to whole events, searched for what a GPU did. Part of `job.py`,
which loads it: stdlib only.
"""

from __future__ import annotations

import json
import os
import re
import shutil

from autoprof.base import files

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gzip import GzipFile
    from typing import Any, BinaryIO

_PIECE = 1 << 20
# The line of a name, and what is looked for first, as most pieces of a trace have none of it: a quote within a name,
# anything that may not be in JSON, and Python's line 0, which is a module's.
_NAME = re.compile(rb'(?<=  )"name": "(.*)"(?=,?\n)')
_QUOTE_WITHIN = re.compile(rb'"name": "[^"]*"(?!,?\n)')
_PLAIN = bytes(range(0x20, 0x7F)).replace(b"\\", b"\n")
_OF_MODULE = re.compile(rb"(?<=\.py\(0\): ).*")
_DEVICE_EVENTS = (b'"cat": "kernel"', b'"cat": "gpu_memcpy"', b'"cat": "gpu_memset"')


def device_events(path: str) -> bool:
    """Return whether a GPU's work is in a Chrome trace of Kineto's: events of these categories (torch 2.13)."""
    end = b""
    with open(path, "rb", opener=files.descriptor) as source:
        while piece := source.read(_PIECE):
            if any(text in end + piece for text in _DEVICE_EVENTS):
                return True
            # The text may lie across two pieces.
            end = (end + piece)[-max(map(len, _DEVICE_EVENTS)) :]
    return False


class RightNames:
    """A file that a trace is written to, with its names made right.

    Kineto writes names as they are (torch 2.13): one quote, as in `record_function('say "hi"')`, and the trace is no
    JSON. And of the code of a module, which is gone after its import, torch keeps only where its name was in memory:
    what is written is what lies there later.
    """

    def __init__(self, file: BinaryIO | GzipFile) -> None:
        self._file = file
        self._rest = b""

    def write(self, piece: bytes) -> None:
        """Write the lines that are whole."""
        lines, newline, rest = piece.rpartition(b"\n")
        if not newline:
            self._rest += rest
            return
        lines = self._rest + lines + newline
        self._rest = rest
        if b".py(0): " in lines or lines.translate(None, _PLAIN) or _QUOTE_WITHIN.search(lines):
            lines = _NAME.sub(_right, lines)
        self._file.write(lines)

    def end(self) -> None:
        """Write what is left."""
        self._file.write(self._rest)


def _right(found: re.Match[bytes]) -> bytes:
    name = _OF_MODULE.sub(b"<module>", found[1])
    try:
        json.loads(b'"%b"' % name)
    except ValueError:
        name = json.dumps(name.decode(errors="replace"))[1:-1].encode()
    return b'"name": "%b"' % name


def copy_cut(source: BinaryIO, target: Any, limit: int) -> None:
    """Copy the head of a Chrome trace up to the last whole event within `limit` bytes, and what follows the events.

    Kineto writes an event as `  {...\\n  },` and the clock's base after the last one (torch 2.13).

    Raises:
        OSError: The trace is not written so.
    """
    length = source.seek(0, os.SEEK_END)
    footer_at, _ = _last(source, b"\n  ]", length)
    _, cut = _last(source, b"\n  }", limit)
    source.seek(0)
    while left := cut - source.tell():
        target.write(source.read(min(left, _PIECE)))
    source.seek(footer_at)
    shutil.copyfileobj(source, target, _PIECE)


def _last(source: BinaryIO, text: bytes, before: int) -> tuple[int, int]:
    """Return where the last `text` before a place begins and ends, looked for from behind."""
    end = before
    while end > 0:
        start = max(0, end - _PIECE)
        source.seek(start)
        found = source.read(end - start).rfind(text)
        if found >= 0:
            return start + found, start + found + len(text)
        # The text may lie across two pieces.
        end = start + len(text) - 1 if start else 0
    raise OSError("it is not written as torch writes traces")
