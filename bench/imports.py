"""CPU time that autoprof adds to the import of a target

Whole processes are measured that import one target and end, in the environment of the real targets. The CPU time with
autoprof on, in the process that starts a run and in a child process, is compared with the CPU time with autoprof off.
With autoprof on, the process reads the recipes, applies the hooks, and writes the states of the hooks to a file. The
process that starts a run also ends the run.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping

from autoprof._boot import FOUND, RUN_ID
from bench import processes
from bench.paired import Case, Table, in_turns
from bench.processes import MAIN
from bench.results import Findings

TURNS, QUICK = 3, 1

MODULES = ("ray", "verl.trainer.main_ppo")
OFF = "off"


def run(turns: int) -> Findings:
    """Measure the import of each installed target."""
    tables, notes = [], []
    with tempfile.TemporaryDirectory() as folder:
        run_variables = {"AUTOPROF": "1", "AUTOPROF_DIR": folder}
        variables = {
            OFF: {},
            "on, starts a run": run_variables,
            "on, in a child": {**run_variables, RUN_ID: "bench", FOUND: sys.prefix},
        }
        for module in MODULES:
            try:  # this import also fills the caches
                processes.run([MAIN, "-c", f"import {module}"])
            except processes.Failed:
                notes.append(f"{module} can't be imported here")
                continue
            title = f"import {module}, CPU time"
            cpu_times = in_turns(
                {case: _timed(module, title, case_variables) for case, case_variables in variables.items()},
                turns,
                warm=0,
            )
            tables.append(Table(title=title, unit="ms", base=OFF, values=cpu_times[title], differences=True))
    return Findings(tables=tables, notes=notes)


def _timed(module: str, title: str, variables: Mapping[str, str]) -> Case:
    return lambda: {title: processes.run([MAIN, "-c", f"import {module}"], variables).cpu_s * 1e3}
