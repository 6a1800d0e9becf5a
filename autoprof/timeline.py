"""Spans of steps and stages, a line each: `timeline/<host>-<pid>.jsonl`."""

from __future__ import annotations

import json
import os
import time

from autoprof import log
from autoprof.runtime import Runtime


class Span:
    """A span that began now. `end` writes it down."""

    def __init__(self, run: Runtime, kind: str, name: str, *, step: int | None, role: str, rank: int | None) -> None:
        self._run = run
        self._line = {"kind": kind, "name": name, "step": step, "role": role, "rank": rank}
        self._start = time.time_ns()

    def end(self, error: BaseException | None = None) -> None:
        """Append the span to this process's file, in one write."""
        line = self._line | {"start_ns": self._start, "end_ns": time.time_ns()}
        if error is not None:
            line["error"] = type(error).__name__
        path = self._run.rundir.process_file("timeline", ".jsonl")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                os.write(descriptor, json.dumps(line).encode() + b"\n")
            finally:
                os.close(descriptor)
        except OSError as problem:
            log.warning_once(f"can't write the timeline: {problem}")
