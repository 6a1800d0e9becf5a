"""Hand-made run directory."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.support.helpers import process_lines


def make_run(parent: Path, name: str, *, state: str = "ended", pid: int = 1, steps: str = "2,4") -> Path:
    """Write a run directory with a complete, a failed and an unfinished capture in step 2, and return its path."""
    folder = parent / name
    step = folder / "global_step_000002"
    step.mkdir(parents=True)
    info = {"id": name, "started": 1795200824.3, "state": state, "host": os.uname().nodename, "pid": pid}
    (folder / "run.json").write_text(json.dumps(info | {"settings": {"steps": steps}}))
    (step / "actor.a.rank0.h.pid1.pt.trace.json.gz").write_bytes(b"x" * 2000)
    (step / "actor.a.rank0.h.pid1.meta.json").write_text(json.dumps({"state": "complete"}))
    (step / "actor.b.rank0.h.pid1.meta.json").write_text(json.dumps({"state": "failed", "reason": "disk full"}))
    (step / "actor.c.rank0.h.pid1.pt.trace.json.part").write_bytes(b"x")
    hook = {"module": "m", "attribute": "a", "behaviour": "stage", "state": "applied", "called": True}
    process = process_lines(
        process="ray::WorkerDict",
        versions={"verl": "0.9.1"},
        hooks={"verl/a": hook, "verl/b": hook | {"state": "failed", "reason": "TypeError: x", "called": False}},
        errors={"verl/a": {"count": 2, "last": "OSError: full"}},
    )
    spans = [{"kind": "step", "step": number, "start_ns": number, "end_ns": number} for number in (1, 2, 3, 4)]
    (folder / "journal").mkdir()
    (folder / "journal" / "h-1.jsonl").write_text(
        process + "".join(json.dumps(span, separators=(",", ":")) + "\n" for span in spans)
    )
    return folder
