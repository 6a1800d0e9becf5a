"""Chrome traces of Kineto: repair of names, cut at a whole event, search for GPU events.

Part of the finisher process: standard library only.
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
# The line of an event's name. Most pieces of a trace need no repair, so they are first searched for a quote within a
# name, for characters that JSON does not allow, and for line 0 of a Python file, which stands for a module.
_NAME = re.compile(rb'(?<=  )"name": "(.*)"(?=,?\n)')
_QUOTE_WITHIN = re.compile(rb'"name": "[^"]*"(?!,?\n)')
_PLAIN = bytes(range(0x20, 0x7F)).replace(b"\\", b"\n")
_OF_MODULE = re.compile(rb"(?<=\.py\(0\): ).*")
_DEVICE_EVENTS = (b'"cat": "kernel"', b'"cat": "gpu_memcpy"', b'"cat": "gpu_memset"')


def device_events(path: str) -> bool:
    """Return True if a Chrome trace of Kineto has events of a GPU, by their categories (torch 2.13)."""
    end = b""
    with open(path, "rb", opener=files.descriptor) as source:
        while piece := source.read(_PIECE):
            if any(text in end + piece for text in _DEVICE_EVENTS):
                return True
            # The text may be split between two pieces.
            end = (end + piece)[-max(map(len, _DEVICE_EVENTS)) :]
    return False


class RightNames:
    """Wrapper of the output file that repairs the names of events.

    Kineto writes names without escapes (torch 2.13). One quote, as in `record_function('say "hi"')`, makes the trace
    invalid JSON. Also, the code object of a module is freed after its import, and torch keeps only a pointer to its
    name. So it may write the bytes that are in that memory later.
    """

    def __init__(self, file: BinaryIO | GzipFile) -> None:
        self._file = file
        self._incomplete = b""

    def write(self, piece: bytes) -> None:
        """Write the complete lines, and keep the last, incomplete one."""
        lines, newline, incomplete = piece.rpartition(b"\n")
        if not newline:
            self._incomplete += incomplete
            return
        lines = self._incomplete + lines + newline
        self._incomplete = incomplete
        if b".py(0): " in lines or lines.translate(None, _PLAIN) or _QUOTE_WITHIN.search(lines):
            lines = _NAME.sub(_right, lines)
        self._file.write(lines)

    def end(self) -> None:
        """Write the last line."""
        self._file.write(self._incomplete)


def _right(found: re.Match[bytes]) -> bytes:
    name = _OF_MODULE.sub(b"<module>", found[1])
    try:
        json.loads(b'"%b"' % name)
    except ValueError:
        name = json.dumps(name.decode(errors="replace"))[1:-1].encode()
    return b'"name": "%b"' % name


def copy_cut(source: BinaryIO, target: Any, limit: int) -> None:
    """Copy a Chrome trace up to the last complete event within `limit` bytes, and the fields after the events.

    Kineto writes an event as `  {...\\n  },` and the base of the clock after the last event (torch 2.13).

    Raises:
        OSError: The trace does not have this form.
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
    """Return the start and end of the last `text` before an offset, searched from there backwards.

    Raises:
        OSError: The text was not found.
    """
    end = before
    while end > 0:
        start = max(0, end - _PIECE)
        source.seek(start)
        found = source.read(end - start).rfind(text)
        if found >= 0:
            return start + found, start + found + len(text)
        # The text may be split between two pieces.
        end = start + len(text) - 1 if start else 0
    raise OSError("the trace does not have torch's format")
