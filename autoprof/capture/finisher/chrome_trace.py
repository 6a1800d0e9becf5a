"""Chrome traces of Kineto: repair of event names, a cut after a complete event, the search for GPU events.

This module is part of the finisher process, so it uses only the standard library.
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
# The `name` field of an event if the name may need a repair. Such a name contains a quote, a backslash or a character
# outside of ASCII, or it is the name for line 0 of a Python file, which stands for a module.
_NAME = re.compile(rb'"name": "(?:(?![ !#-\[\]-~]*",?\n)|(?=.*\.py\(0\): ))(?<=  "name": ")(.*)"(?=,?\n)')
_MODULE_NAME = re.compile(rb"(?<=\.py\(0\): ).*")
_DEVICE_EVENTS = (b'"cat": "kernel"', b'"cat": "gpu_memcpy"', b'"cat": "gpu_memset"')


def device_events(path: str) -> bool:
    """Return True if a Chrome trace of Kineto contains an event with a category of GPU events (torch 2.13)."""
    previous_end = b""
    with open(path, "rb", opener=files.descriptor) as source:
        while piece := source.read(_PIECE):
            if any(text in previous_end + piece for text in _DEVICE_EVENTS):
                return True
            # The text may be split between two pieces.
            previous_end = (previous_end + piece)[-max(map(len, _DEVICE_EVENTS)) :]
    return False


def copy(source: BinaryIO, target: Any, end: int) -> None:
    """Copy a Chrome trace from the current position up to the offset `end`, and repair the names of events.

    Kineto writes names without escapes (torch 2.13). A quote in a name, as in `record_function('say "hi"')`, makes the
    trace invalid JSON.

    Also, names of modules may be wrong. Python frees the code object of a module after the import of the module, but
    torch keeps only a pointer to the name in the code object. So Kineto may write other bytes in place of the name.
    """
    while lines := source.read(min(end - source.tell(), _PIECE)):
        lines += source.readline(end - source.tell())
        target.write(_NAME.sub(_repaired, lines))


def _repaired(match: re.Match[bytes]) -> bytes:
    name = _MODULE_NAME.sub(b"<module>", match[1])
    try:
        json.loads(b'"%b"' % name)
    except ValueError:
        name = json.dumps(name.decode(errors="replace"))[1:-1].encode()
    return b'"name": "%b"' % name


def copy_cut(source: BinaryIO, target: Any, limit: int) -> None:
    """Copy a Chrome trace up to the last complete event within `limit` bytes, then the fields that follow the events.

    Kineto writes an event as `  {...\\n  },`. After the last event, it writes the base of the clock (torch 2.13).

    Raises:
        OSError: The trace does not have this form.
    """
    length = source.seek(0, os.SEEK_END)
    footer_start, _ = _last(source, b"\n  ]", length)
    _, event_end = _last(source, b"\n  }", limit)
    source.seek(0)
    copy(source, target, event_end)
    source.seek(footer_start)
    copy(source, target, length)


def _last(source: BinaryIO, text: bytes, end_offset: int) -> tuple[int, int]:
    """Return the start and the end of the last occurrence of `text` before the offset `end_offset`.

    The search reads the file backwards from `end_offset`.

    Raises:
        OSError: The file does not contain the text before the offset.
    """
    end = end_offset
    while end > 0:
        start = max(0, end - _PIECE)
        source.seek(start)
        index = source.read(end - start).rfind(text)
        if index >= 0:
            return start + index, start + index + len(text)
        # The text may be split between two pieces.
        end = start + len(text) - 1 if start else 0
    raise OSError("the trace does not have torch's format")
