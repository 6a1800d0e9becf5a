"""Time and memory to sum a trace up by operator

One made-up trace of 300 MB in Kineto's layout: modules that call operators that call operators, one of which takes half
a microsecond. Three ways to sum it: autoprof, which also finds own times; HolisticTraceAnalysis, which reads the trace
into a pandas table; and `json.load` with a loop. Each way runs in a separate process. The program that makes the trace
knows the true sums; the errors are listed below.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from bench import processes
from bench.paired import Case, Goal, Table, in_turns
from bench.processes import CHILDREN, MAIN, absent, there
from bench.results import Findings

TURNS, QUICK = 2, 1
MEGABYTES, QUICK_MEGABYTES = 300, 20

OURS, HTA = "autoprof", "HolisticTraceAnalysis"
# Cases: the peer whose environment is used (empty: the project's), and the case's name in children/sums.py.
WAYS = {OURS: ("", "autoprof"), "json.load": ("", "plain"), HTA: ("hta", "hta")}
TIME, PEAK = "Time", "Peak of memory"


def run(turns: int) -> Findings:
    """Measure all installed ways."""
    notes = absent(WAYS)
    megabytes = MEGABYTES if turns > QUICK else QUICK_MEGABYTES
    if megabytes != MEGABYTES:
        notes.append(f"a trace of {megabytes} MB")
    with tempfile.TemporaryDirectory() as folder:
        processes.run([MAIN, CHILDREN / "sums.py", "make", folder, str(megabytes)])
        taken = in_turns({case: _summed(*way, folder) for case, way in there(WAYS).items()}, turns, warm=0)
    for what, which in (("short", "less than a microsecond a call"), ("long", "more")):
        off = (f"{case} {max(values):.1%}" for case, values in taken[what].items())
        notes.append(f"the sum of an operator that takes {which} is off by: {', '.join(off)}")
    return Findings(
        tables=[
            Table(title=TIME, unit="s", base=OURS, values=taken["seconds"]),
            Table(title=PEAK, unit="MB", base=OURS, values=taken["peak"]),
        ],
        goals=[
            Goal(
                text=f"sums, at most a tenth of {HTA}'s time",
                table=TIME,
                case=OURS,
                base=HTA,
                limit=0.1,
                remedy="another algorithm for own times, which visits each event once.",
            )
        ],
        notes=notes,
    )


def _summed(python: Path, way: str, folder: str) -> Case:
    def measure() -> dict[str, float]:
        said = processes.run([python, CHILDREN / "sums.py", way, folder]).output
        found: dict[str, float] = json.loads(said.splitlines()[-1])
        return found

    return measure
