"""Cost of a stage inside of a window

A stage of about a second runs in one process in four ways:

* without a profiler;
* with `torch.profiler` added by hand, which writes a trace (`tensorboard_trace_handler`, plain JSON);
* with `torch.profiler` added by hand, which is started before the stage and stopped after it, but exports nothing;
* with autoprof: a recipe hooks the toy trainer's step and stage, the step is captured, and the hooked call is measured.

While autoprof writes the trace, the next case waits.
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
    """Measure the stage in a child process, which imports torch."""
    with tempfile.TemporaryDirectory() as folder:
        variables = {
            "AUTOPROF": "1",
            "AUTOPROF_DIR": folder,
            "AUTOPROF_CONTENTS": "cpu",
            "AUTOPROF_STEPS": f"1:{turns + 2}",
            "AUTOPROF_RECIPES": str(CHILDREN / "toy.toml"),
        }
        output = processes.run([MAIN, CHILDREN / "inside.py", str(turns), str(ROUNDS)], variables).output
    seconds = msgspec.json.decode(output.splitlines()[-1], type=Taken)
    goal = Goal(
        text="a captured stage, at most 1.02 of torch.profiler by hand, which also writes a trace",
        table=STAGE,
        case=AUTOPROF,
        limit=1.02,
        remedy="an export without the interpreter's lock. torch's (2.13, `kineto_results.save`) holds it from begin "
        "to end, so autoprof's writing thread also delays the training thread.",
    )
    return Findings(tables=[Table(title=STAGE, unit="s", base=BY_HAND, values=seconds[STAGE])], goals=[goal])
