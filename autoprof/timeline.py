"""Spans of steps and stages, a line each: `timeline/<host>-<pid>.jsonl`."""

from __future__ import annotations

import json
import time

from autoprof import _files, log
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
        path = self._run.rundir.process_file("timeline", ".jsonl")
        try:
            self._run.rundir.make(path.parent)
            _files.append(path, json.dumps(line).encode() + b"\n")
        except OSError as problem:
            log.warning_once(f"can't write the timeline: {problem}")
