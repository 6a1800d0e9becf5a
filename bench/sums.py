"""Time and memory to sum a trace up by operator

The trace is made up, has 300 MB, and has Kineto's layout. In it, modules call operators, which call other operators.
One of these operators takes half a microsecond. The trace is summed up in three ways: by autoprof, which also finds own
times; by HolisticTraceAnalysis, which reads the trace into a pandas table; and by `json.load` with a loop. Each way
runs in a separate process. The program that makes the trace knows the true sums. The errors of each way are listed
below the tables.
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
# dict from case to the peer whose environment is used (empty: the project's), and the name of the case in
# children/sums.py.
WAYS = {OURS: ("", "autoprof"), "json.load": ("", "plain"), HTA: ("hta", "hta")}
TIME, PEAK = "Time", "Peak of memory"


def run(turns: int) -> Findings:
    """Measure each way whose packages are installed."""
    notes = absent(WAYS)
    megabytes = MEGABYTES if turns > QUICK else QUICK_MEGABYTES
    if megabytes != MEGABYTES:
        notes.append(f"a trace of {megabytes} MB")
    with tempfile.TemporaryDirectory() as folder:
        processes.run([MAIN, CHILDREN / "sums.py", "make", folder, str(megabytes)])
        results = in_turns({case: _summed(*way, folder) for case, way in there(WAYS).items()}, turns, warm=0)
    for kind, duration in (("short", "less than a microsecond a call"), ("long", "more")):
        errors = (f"{case} {max(values):.1%}" for case, values in results[kind].items())
        notes.append(f"the sum of an operator that takes {duration} is off by: {', '.join(errors)}")
    return Findings(
        tables=[
            Table(title=TIME, unit="s", base=OURS, values=results["seconds"]),
            Table(title=PEAK, unit="MB", base=OURS, values=results["peak"]),
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
        output = processes.run([python, CHILDREN / "sums.py", way, folder]).output
        result: dict[str, float] = json.loads(output.splitlines()[-1])
        return result

    return measure
