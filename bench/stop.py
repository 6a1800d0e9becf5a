"""Time for which the training thread waits at the end of a capture

In one process, the same work is recorded by autoprof, by verl's own profiler, and by torch.profiler with plain JSON.
The trace has 120 MB. The function and the handler of verl's own profiler (verl.utils.profiler) compress the trace in
the training thread.

The first table has the time from the end of the work until the thread continues. The second table has the time of other
work while autoprof writes and compresses the trace, compared with the time of this work while nothing is written.
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
    """Measure in a child process, which imports torch and verl."""
    megabytes = MEGABYTES if turns > QUICK else QUICK_MEGABYTES
    with tempfile.TemporaryDirectory() as folder:
        variables = {
            "AUTOPROF": "1",
            "AUTOPROF_RUN_ID": "bench",
            "AUTOPROF_DIR": folder,
            "AUTOPROF_CONTENTS": "cpu",
        }
        output = processes.run([MAIN, CHILDREN / "stop.py", str(turns), str(megabytes), folder], variables).output
    seconds = msgspec.json.decode(output.splitlines()[-1], type=Taken)
    return Findings(
        tables=[
            Table(title=STOP, unit="s", base=VERL, values=seconds[STOP]),
            Table(title=MEANWHILE, unit="s", base=UNDISTURBED, values=seconds[MEANWHILE]),
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
