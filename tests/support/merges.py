"""Runs to merge, and readers of merged traces."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from autoprof.rundir import layout
from autoprof.rundir.layout import RunDir
from autoprof.rundir.records import CaptureMeta
from autoprof.traces.merge import Summary, merge
from autoprof.traces.rewrite import Input
from tests.support.helpers import autoprof
from tests.support.traces import Event, kineto, load, process, save

UNKNOWN = layout.record({}, CaptureMeta)
DESCRIBED = ("process_name", "process_labels", "process_sort_index")


def merged(folder: Path, *contents: bytes, jobs: int = 1, **metas: CaptureMeta) -> tuple[list[Event], Summary]:
    paths = [save(folder / f"{number}.json.gz", content) for number, content in enumerate(contents)]
    inputs = [Input(path=path, label=path.name[0], meta=metas.get(f"m{path.name[0]}", UNKNOWN)) for path in paths]
    summary = merge(inputs, folder / "out.json.gz", jobs)
    assert not list(folder.glob("*.part"))
    events: list[Event] = load(folder / "out.json.gz")["traceEvents"]
    assert summary.events == len(events)
    return events, summary


def described(events: list[Event], what: str, field: str) -> dict[int, Any]:
    return {event["pid"]: event["args"][field] for event in events if event["name"] == what}


def meta(host: str, unix_ns: int, monotonic_ns: int) -> dict[str, Any]:
    return {"host": host, "clock": {"start": {"unix_ns": unix_ns, "monotonic_ns": monotonic_ns}}}


def capture(run: Path, step: int, name: str, content: bytes, **fields: Any) -> None:
    folder = RunDir(run).step(step)
    save(folder / f"{name}.pt.trace.json.gz", content)
    state = {"state": "complete", "host": "h", "rank": 0, "replica": None} | fields
    (folder / f"{name}.meta.json").write_text(json.dumps(state))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Make a run of two steps. Step 2 has a replica of two ranks, a replica of one rank, an actor and a trainer."""
    path = tmp_path / "autoprof_runs" / "20261120-101010-aaaaaa"
    for rank in (1, 0):
        name = f"rollout.replica0.TP-{rank}.h.pid9"
        capture(path, 2, name, kineto(process(9, "sglang")), replica=0, rank=rank, stage="rollout")
    capture(path, 2, "rollout.replica1.TP-0.h.pid8", kineto(process(8, "sglang")), replica=1, rank=2)
    capture(path, 2, "actor.update_actor.2.rank0.h.pid7", kineto(process(7, "ray")))
    capture(path, 2, "trainer.compute_advantage.rank0.h.pid6", kineto(process(6, "ray")))
    capture(path, 4, "actor.update_actor.rank0.h.pid7", kineto(process(7, "ray")))
    (path / "run.json").write_text(json.dumps({"id": path.name, "state": "ended", "settings": {"steps": "2,4"}}))
    return path


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return autoprof(*arguments, cwd=folder)


def roles_in(trace: Path) -> set[str]:
    names = described(load(trace)["traceEvents"], "process_name", "name").values()
    return {name.split()[0].split(".")[0] for name in names}
