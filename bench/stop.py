"""Time for which the training thread waits at the end of a capture

The same work, a trace of 120 MB, is recorded in one process by autoprof, by verl's own profiler (verl.utils.profiler,
with its function and its handler, which compress in the training thread), and by torch.profiler with plain JSON. The
first table has the time from the end of the work until the thread continues. The second table has the time of other
work while autoprof writes and compresses the trace, compared with the same work without it.
"""

from __future__ import annotations

import tempfile

import msgspec

from bench import processes
from bench.paired import Goal, Table, Taken
from bench.processes import CHILDREN, MAIN
from bench.results import Findings

TURNS, QUICK = 3, 1
MEGABYTES, QUICK_MEGABYTES = 120, 20

VERL, PLAIN, AUTOPROF = "verl's own profiler", "torch.profiler, plain JSON", "autoprof"
UNDISTURBED = "nothing is written"
STOP, MEANWHILE = "Stop", "Other work while autoprof writes"


def run(turns: int) -> Findings:
    """Measure in a process that has torch and verl."""
    megabytes = MEGABYTES if turns > QUICK else QUICK_MEGABYTES
    with tempfile.TemporaryDirectory() as folder:
        variables = {
            "AUTOPROF": "1",
            "AUTOPROF_RUN_ID": "bench",
            "AUTOPROF_DIR": folder,
            "AUTOPROF_CONTENTS": "cpu",
        }
        said = processes.run([MAIN, CHILDREN / "stop.py", str(turns), str(megabytes), folder], variables).output
    taken = msgspec.json.decode(said.splitlines()[-1], type=Taken)
    return Findings(
        tables=[
            Table(title=STOP, unit="s", base=VERL, values=taken[STOP]),
            Table(title=MEANWHILE, unit="s", base=UNDISTURBED, values=taken[MEANWHILE]),
        ],
        goals=[
            Goal(
                text="the stop, at most 0.25 of verl's",
                table=STOP,
                case=AUTOPROF,
                limit=0.25,
                remedy="an export without the interpreter's lock; torch's (2.13) holds it from begin to end.",
            )
        ],
        notes=[f"a trace of {megabytes} MB"] if megabytes != MEGABYTES else [],
    )
