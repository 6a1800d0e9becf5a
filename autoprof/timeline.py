"""Spans of steps and stages, a line each: `timeline/<host>-<pid>.jsonl`."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec

from autoprof import _files, log
from autoprof.rundir import RunDir
from autoprof.runtime import Runtime


class Span:
    """A span that began now. `end` writes it down."""

    def __init__(self, run: Runtime, kind: str, name: str, *, step: int | None, role: str, rank: int | None) -> None:
        self._run = run
        self._line = {"kind": kind, "name": name, "step": step, "role": role, "rank": rank}
        self._start = time.time_ns()
        self._begun = time.monotonic_ns()

    def end(self, error: BaseException | None = None) -> None:
        """Append the span to this process's file, in one write."""
        # The wall clock may be set meanwhile.
        end = self._start + time.monotonic_ns() - self._begun
        line = self._line | {"start_ns": self._start, "end_ns": end}
        if error is not None:
            line["error"] = type(error).__name__
        try:
            _append(self._run.rundir, msgspec.json.encode(line) + b"\n")
        except OSError as problem:
            log.warning_once(f"can't write the timeline: {problem}")


# The file of this process, once its folder is there.
_file: tuple[RunDir, int, str] | None = None


def _append(run: RunDir, content: bytes) -> None:
    global _file
    if _file is None or _file[0] is not run or _file[1] != os.getpid():
        path = run.process_file("timeline", ".jsonl")
        run.make(path.parent)
        _file = (run, os.getpid(), str(path))
    try:
        _files.append(_file[2], content)
    except FileNotFoundError:  # somebody has removed the folder
        run.make(Path(_file[2]).parent)
        _files.append(_file[2], content)
