"""Cost for a step to listen to `autoprof trigger`, with no request

A chooser of steps that looks, as a trainer's does when a step begins, in a process of its own, at a run's `control/` on
this machine's disk: with what other runs before it have left in there, which is not listed, and connected to a Ray
cluster of one node, where it reads one key besides. Beside it what the framework does for itself: a put into Ray's
key-value store, as the step is posted by one, and a call of an actor that returns at once, of which a trainer makes
several a step and worker.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from bench.paired import Case, Goal, Table, in_turns
from bench.processes import CHILDREN, MAIN
from bench.processes import run as started
from bench.results import Findings

TURNS, QUICK = 5, 1

STAT, DISK, FULL = "os.stat of a folder", "listening, on disk", "listening, on disk, 1,000 old requests"
LISTED = "os.listdir of 1,000 old requests"
RAY, PUT, CALL = "listening, on disk and in Ray", "Ray: one put", "Ray: one call of an actor"
CASES = {
    STAT: "stat",
    DISK: "disk",
    FULL: "full",
    LISTED: "listed",
    RAY: "ray",
    PUT: "put",
    CALL: "call",
}


def run(turns: int) -> Findings:
    """Measure all cases."""
    with tempfile.TemporaryDirectory() as folder:
        values = in_turns({case: _measured(name, Path(folder)) for case, name in CASES.items()}, turns, warm=0)
    table = "Step"
    goals = [
        Goal(
            text="a step's listening where Ray is up: at most a call of an actor",
            table=table,
            case=RAY,
            base=CALL,
            limit=1.0,
            remedy="a bell that is rung in an actor's mailbox; a read of the store is a round trip to the head.",
        ),
        Goal(
            text="a folder with 1,000 old requests: no more than an empty one, within noise",
            table=table,
            case=FULL,
            base=DISK,
            limit=1.1,
            within_noise=True,
            remedy="a folder that is not listed where it has not changed.",
        ),
    ]
    return Findings(tables=[Table(title=table, unit="µs", base=STAT, values=values[table])], goals=goals, notes=[])


def _measured(name: str, folder: Path) -> Case:
    def measure() -> dict[str, float]:
        said: dict[str, float] = json.loads(started([MAIN, CHILDREN / "listening.py", name, folder]).output)
        return said

    return measure
