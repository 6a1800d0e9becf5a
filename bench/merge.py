"""Time and memory to merge the traces of several ranks

Four traces of 50 MB, made up in Kineto's layout, of equal content. autoprof's merge runs in one process and in as many
as there are cores for; beside it SGLang's own `ProfileMerger`, by its source, and the shortest merge that is right
about nothing: `json.load`, one list, `json.dumps`, gzip at level 1. Each runs in a process of its own. Memory is the
peak of all processes at work. tests/unit/traces/test_merge.py proves the results; only the flows are counted here.

Then eight traces of 300 MB, which autoprof alone merges: the others hold all of their events at once.
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
    """Measure the mergers that are there."""
    python, notes = interpreter("sglang"), []
    source = str(site_packages(python) / "sglang/srt/utils/profile_merger.py") if python else ""
    ways = {ONE: "one", CORES: "cores", "json.load, json.dumps": "plain"}
    if source:
        ways["SGLang's ProfileMerger"] = "sglang"
    else:
        notes.append(missing("sglang"))
    megabytes = MEGABYTES if turns > QUICK else QUICK_MEGABYTES
    if megabytes != MEGABYTES:
        notes.append(f"traces of {megabytes} MB")
    with tempfile.TemporaryDirectory() as folder:
        processes.run([MAIN, CHILDREN / "merge.py", "make", folder, str(RANKS), str(megabytes)])
        taken = in_turns({case: _merged(way, folder, source) for case, way in ways.items()}, turns, warm=0)
        large = _large(Path(folder), megabytes)
    if len({count for counts in taken["flows"].values() for count in counts}) != 1:
        raise Failed(f"the merged traces have different flows: {taken['flows']}")
    sizes = (f"{case} {values[0] / 1e6:.1f} MB" for case, values in taken["bytes"].items())
    notes.append(f"the merged files: {', '.join(sizes)}")
    return Findings(
        tables=[
            Table(title=TIME, unit="s", base=ONE, values=taken["seconds"]),
            Table(title=PEAK, unit="MB", base=ONE, values=taken["peak"]),
            Table(title=f"{TIME}, large", unit="s", base=ONE, values=large["seconds"]),
            Table(title=f"{PEAK}, large", unit="MB", base=ONE, values=large["peak"]),
        ],
        notes=notes,
    )


def _large(folder: Path, megabytes: int) -> Taken:
    """Measure autoprof with many large traces, in the proportion in which `megabytes` are less."""
    for path in folder.iterdir():
        path.unlink()
    size = LARGE * megabytes // MEGABYTES
    processes.run([MAIN, CHILDREN / "merge.py", "make", folder, str(MANY), str(size)])
    return in_turns(
        {case: _merged(way, str(folder), "") for case, way in {ONE: "one", CORES: "cores"}.items()}, 1, warm=0
    )


def _merged(way: str, folder: str, source: str) -> Case:
    def measure() -> dict[str, float]:
        # The runner is small: a child's peak of memory begins with that of the process that starts it.
        said = processes.run([MAIN, CHILDREN / "merge.py", way, Path(folder), source]).output
        found: dict[str, float] = json.loads(said.splitlines()[-1])
        return found

    return measure
