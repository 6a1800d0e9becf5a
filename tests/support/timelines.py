"""Timelines that tests write span by span, and the figures of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from autoprof.report import build
from autoprof.report.model import RunFigures, StepFigures
from autoprof.rundir import runs
from tests.support.report_runs import START_NS, write

SECOND = 10**9


def figures(folder: Path, *steps: int) -> RunFigures:
    return build.figures(runs.read(folder), steps)


def timeline(folder: Path, **processes: list[dict[str, Any]]) -> Path:
    """Write a run directory with these spans of each process, in seconds since the run's start; return its path."""
    (folder / "journal").mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"id": folder.name}))
    for number, (name, spans) in enumerate(processes.items()):
        lines = []
        for span in spans:
            start, end = span.pop("at")
            ns = {"start_ns": START_NS + int(start * SECOND), "end_ns": START_NS + int(end * SECOND)}
            filled = {"step": 1, "role": "trainer", "rank": None, **span, **ns}
            lines.append(json.dumps(filled, separators=(",", ":")) + "\n")
        (folder / "journal" / f"{name}-{number + 10}.jsonl").write_text("".join(lines))
    return folder


def span(kind: str, name: str, start: float, end: float, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "name": name, "at": (start, end), **more}


def step(end: float, number: int = 1, start: float = 0.0, **more: Any) -> dict[str, Any]:
    return span("step", "step", start, end, step=number, **more)


def shown(tmp_path: Path, **plants: int) -> StepFigures:
    write(tmp_path / "run", **plants)
    (found,) = figures(tmp_path / "run", 5).details
    return found
