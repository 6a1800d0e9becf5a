"""Chrome traces as Kineto writes them: cut to whole events, searched for what a GPU did. Part of `job.py`, which
loads it: stdlib only.
"""

from __future__ import annotations

import os
import shutil
from typing import Any, BinaryIO

_PIECE = 1 << 20
_DEVICE_EVENTS = (b'"cat": "kernel"', b'"cat": "gpu_memcpy"', b'"cat": "gpu_memset"')


def device_events(path: str) -> bool:
    """Return whether a GPU's work is in a Chrome trace of Kineto's: events of these categories (torch 2.13)."""
    end = b""
    with open(path, "rb") as source:
        while piece := source.read(_PIECE):
            if any(text in end + piece for text in _DEVICE_EVENTS):
                return True
            # The text may lie across two pieces.
            end = (end + piece)[-max(map(len, _DEVICE_EVENTS)) :]
    return False


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
