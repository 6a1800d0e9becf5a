"""Cost for a step to listen to `autoprof trigger`, with no request

A trainer lists the run's `control/` when a step begins. The code that lists the folder is measured in a separate
process, on this machine's disk: with an empty folder, and with 1,000 old requests. The time is compared with calls that
a trainer on Ray makes anyway: a put into Ray's key-value store, which announces the step, and a call of an actor that
returns at once. A trainer makes several such calls per step and worker.
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

STAT, EMPTY, FULL = "os.stat of a folder", "listening", "listening, 1,000 old requests"
LISTED = "os.listdir of 1,000 old requests"
PUT, CALL = "Ray: one put", "Ray: one call of an actor"
CASES = {
    STAT: "stat",
    EMPTY: "empty",
    FULL: "full",
    LISTED: "listed",
    PUT: "put",
    CALL: "call",
}


def run(turns: int) -> Findings:
    """Measure all cases, each in a separate process."""
    with tempfile.TemporaryDirectory() as folder:
        values = in_turns({case: _measured(name, Path(folder)) for case, name in CASES.items()}, turns, warm=0)
    table = "Step"
    goals = [
        Goal(
            text="listening in a step, with 1,000 old requests: at most a call of an actor",
            table=table,
            case=FULL,
            base=CALL,
            limit=1.0,
            remedy="no listing of a folder that has not changed.",
        ),
    ]
    return Findings(tables=[Table(title=table, unit="µs", base=STAT, values=values[table])], goals=goals, notes=[])


def _measured(name: str, folder: Path) -> Case:
    def measure() -> dict[str, float]:
        result: dict[str, float] = json.loads(started([MAIN, CHILDREN / "listening.py", name, folder]).output)
        return result

    return measure
