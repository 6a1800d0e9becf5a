"""Finishes a capture in a process of its own: compresses the raw trace, names it, and writes its meta file.

Run as a script with one JSON job on stdin, isolated and without site, so that it starts in milliseconds. Stdlib only.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import sys
from typing import Any, BinaryIO

PART = ".part"
# torch's own export compresses at level 9, in the training thread: bench/stop.py compares the two.
LEVEL = 4


def finish(job: dict[str, Any]) -> None:
    """Make `job["trace"]` and `job["meta_path"]` from `job["raw"]`, which is removed.

    The meta file comes last and says `complete` or `truncated` of a trace that has its final name; where the trace
    can't be written it says `failed`.
    """
    meta = job["meta"]
    raw, trace = job["raw"], job["trace"]
    try:
        with open(raw, "rb") as source, gzip.open(trace + PART, "wb", compresslevel=LEVEL) as target:
            if os.path.getsize(raw) <= job["max_bytes"]:
                shutil.copyfileobj(source, target, 1 << 20)
            else:
                _copy_cut(source, target, job["max_bytes"])
                meta |= {"state": "truncated", "reason": f"the trace was over {job['max_bytes']} bytes"}
        os.replace(trace + PART, trace)
        meta["bytes"] = os.path.getsize(trace)
        os.unlink(raw)
    except OSError as error:
        meta |= {"state": "failed", "reason": f"the trace could not be written: {error}"}
        for leftover in (trace + PART, raw):
            _remove(leftover)
    try:
        with open(job["meta_path"] + PART, "w", encoding="utf-8") as file:
            json.dump(meta, file, indent=1, default=str)
            file.write("\n")
        os.replace(job["meta_path"] + PART, job["meta_path"])
    except OSError:  # nobody is there to be told
        _remove(job["meta_path"] + PART)


def _remove(path: str) -> None:
    if os.path.lexists(path):
        os.unlink(path)


def _copy_cut(source: BinaryIO, target: Any, limit: int) -> None:
    """Copy the head of a Chrome trace up to the last whole event within `limit` bytes, and what follows the events.

    Kineto writes an event as `  {...\\n  },` and the clock's base after the last one (torch 2.13).
    """
    size = source.seek(0, os.SEEK_END)
    tail_start = max(0, size - 65536)
    source.seek(tail_start)
    tail = source.read()
    footer = tail[tail.rindex(b"\n  ]") :]
    source.seek(0)
    head = source.read(limit)
    target.write(head[: head.rindex(b"\n  },") + len(b"\n  }")])
    target.write(footer)


if __name__ == "__main__":
    received = json.load(sys.stdin)
    # Ray kills the children of a worker that exits (core worker, kill_child_processes_on_worker_exit), so this one
    # stops being a child before the worker goes on.
    if os.fork():
        os._exit(0)
    os.nice(10)
    finish(received)
