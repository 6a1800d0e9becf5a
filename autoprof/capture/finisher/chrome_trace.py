"""Chrome traces of Kineto: repair of names, cut at a whole event, search for GPU events.

Part of the finisher process: standard library only.
"""

from __future__ import annotations

import json
import os
import re

from autoprof.base import files

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, BinaryIO

_PIECE = 1 << 20
# An event's name that may have to be repaired: with a quote, a backslash or a character outside of ASCII, or of line 0
# of a Python file, which stands for a module.
_NAME = re.compile(rb'"name": "(?:(?![ !#-\[\]-~]*",?\n)|(?=.*\.py\(0\): ))(?<=  "name": ")(.*)"(?=,?\n)')
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


def copy(source: BinaryIO, target: Any, end: int) -> None:
    """Copy the lines of a Chrome trace from the current position to an offset, and repair the names of events.

    Kineto writes names without escapes (torch 2.13). One quote, as in `record_function('say "hi"')`, makes the trace
    invalid JSON. Also, the code object of a module is freed after its import, and torch keeps only a pointer to its
    name. So it may write the bytes that are in that memory later.
    """
    while lines := source.read(min(end - source.tell(), _PIECE)):
        lines += source.readline(end - source.tell())
        target.write(_NAME.sub(_right, lines))


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
    copy(source, target, cut)
    source.seek(footer_at)
    copy(source, target, length)


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
