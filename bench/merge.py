"""Time and memory to merge the traces of several ranks

Four made-up traces of 50 MB in Kineto's layout, with equal content, are merged. autoprof merges them in one process,
and in one process per core. autoprof is compared with SGLang's own `ProfileMerger`, loaded from its source, and with
the shortest possible merge, which corrects nothing: `json.load`, one list, `json.dumps`, gzip at level 1. Each case
runs in a separate process. Memory is the peak of all processes at work. tests/unit/traces/test_merge.py checks the
merged traces; this benchmark counts only their flows.

Then eight traces of 300 MB are merged, by autoprof only: the other ways keep all events in memory at once.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from bench import processes
from bench.paired import Case, Table, Taken, in_turns
from bench.processes import CHILDREN, MAIN, Failed, interpreter, missing, site_packages
from bench.results import Findings

TURNS, QUICK = 2, 1
RANKS, MEGABYTES, QUICK_MEGABYTES = 4, 50, 5
MANY, LARGE = 8, 300

ONE = "autoprof, one process"
CORES = "autoprof, all cores"
TIME, PEAK = "Time", "Peak of memory"


def run(turns: int) -> Findings:
    """Measure the merge by autoprof, by `json`, and by SGLang if it is installed."""
    python, notes = interpreter("sglang"), []
    source = str(site_packages(python) / "sglang/srt/utils/profile_merger.py") if python else ""
    way_by_case = {ONE: "one", CORES: "cores", "json.load, json.dumps": "plain"}
    if source:
        way_by_case["SGLang's ProfileMerger"] = "sglang"
    else:
        notes.append(missing("sglang"))
    megabytes = MEGABYTES if turns > QUICK else QUICK_MEGABYTES
    if megabytes != MEGABYTES:
        notes.append(f"traces of {megabytes} MB")
    with tempfile.TemporaryDirectory() as folder:
        processes.run([MAIN, CHILDREN / "merge.py", "make", folder, str(RANKS), str(megabytes)])
        results = in_turns({case: _merged(way, folder, source) for case, way in way_by_case.items()}, turns, warm=0)
        large_results = _large(Path(folder), megabytes)
    if len({count for counts in results["flows"].values() for count in counts}) != 1:
        raise Failed(f"the merged traces have different flows: {results['flows']}")
    sizes = (f"{case} {values[0] / 1e6:.1f} MB" for case, values in results["bytes"].items())
    notes.append(f"the merged files: {', '.join(sizes)}")
    return Findings(
        tables=[
            Table(title=TIME, unit="s", base=ONE, values=results["seconds"]),
            Table(title=PEAK, unit="MB", base=ONE, values=results["peak"]),
            Table(title=f"{TIME}, large", unit="s", base=ONE, values=large_results["seconds"]),
            Table(title=f"{PEAK}, large", unit="MB", base=ONE, values=large_results["peak"]),
        ],
        notes=notes,
    )


def _large(folder: Path, megabytes: int) -> Taken:
    """Measure how autoprof merges many large traces. Their size is proportional to `megabytes`."""
    for path in folder.iterdir():
        path.unlink()
    size = LARGE * megabytes // MEGABYTES
    processes.run([MAIN, CHILDREN / "merge.py", "make", folder, str(MANY), str(size)])
    return in_turns(
        {case: _merged(way, str(folder), "") for case, way in {ONE: "one", CORES: "cores"}.items()}, 1, warm=0
    )


def _merged(merger: str, folder: str, source: str) -> Case:
    def measure() -> dict[str, float]:
        # The peak of memory of a child process is at least its parent's memory. The parent of these processes is small.
        output = processes.run([MAIN, CHILDREN / "merge.py", merger, Path(folder), source]).output
        result: dict[str, float] = json.loads(output.splitlines()[-1])
        return result

    return measure
