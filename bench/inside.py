"""Cost of a stage inside of a window

The same stage, of about a second, in one process: without a profiler; with a torch.profiler that somebody has written
around it, which leaves a trace (`tensorboard_trace_handler`, plain JSON); with the same that leaves none (started
before, stopped after, nothing exported); and by autoprof: the toy trainer's step and stage are wrapped as a recipe
says, the step is captured, and what is measured is the wrapped call. Where autoprof writes the trace, the next case
waits for it.
"""

from __future__ import annotations

import tempfile

import msgspec

from bench import processes
from bench.paired import Goal, Table, Taken
from bench.processes import CHILDREN, MAIN
from bench.results import Findings

TURNS, QUICK = 12, 1
ROUNDS = 10_000

BARE, AUTOPROF = "no profiler", "autoprof"
BY_HAND, NOTHING_LEFT = "torch.profiler by hand", "torch.profiler by hand, nothing exported"
STAGE = "Stage"


def run(turns: int) -> Findings:
    """Measure in a process that has torch."""
    with tempfile.TemporaryDirectory() as folder:
        variables = {
            "AUTOPROF": "1",
            "AUTOPROF_DIR": folder,
            "AUTOPROF_CONTENTS": "cpu",
            "AUTOPROF_STEPS": f"1:{turns + 2}",
            "AUTOPROF_RECIPES": str(CHILDREN / "toy.toml"),
        }
        said = processes.run([MAIN, CHILDREN / "inside.py", str(turns), str(ROUNDS)], variables).output
    taken = msgspec.json.decode(said.splitlines()[-1], type=Taken)
    goal = Goal(
        text="a captured stage, at most 1.02 of torch.profiler by hand, which leaves a trace too",
        table=STAGE,
        case=AUTOPROF,
        limit=1.02,
        remedy="an export that leaves the interpreter's lock alone. torch's (2.13, `kineto_results.save`) holds it "
        "from begin to end, so the thread in which autoprof writes holds the training thread up, too.",
    )
    return Findings(tables=[Table(title=STAGE, unit="s", base=BY_HAND, values=taken[STAGE])], goals=[goal])
