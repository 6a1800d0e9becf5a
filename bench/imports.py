"""CPU time that autoprof adds to the import of a target

Whole processes that import one target and end, in the environment of the real targets. CPU time with autoprof on, in
the process that starts a run and in a child process, is compared with CPU time with autoprof off. With autoprof on, the
recipes are read, the hooks are applied, and their states are written to a file. The process that starts a run also ends
it.
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
    """Measure the targets that are installed."""
    tables, notes = [], []
    with tempfile.TemporaryDirectory() as folder:
        on = {"AUTOPROF": "1", "AUTOPROF_DIR": folder}
        variables = {
            OFF: {},
            "on, starts a run": on,
            "on, in a child": {**on, RUN_ID: "bench", FOUND: sys.prefix},
        }
        for module in MODULES:
            try:  # this also fills the caches
                processes.run([MAIN, "-c", f"import {module}"])
            except processes.Failed:
                notes.append(f"{module} can't be imported here")
                continue
            title = f"import {module}, CPU time"
            taken = in_turns({case: _timed(module, title, of) for case, of in variables.items()}, turns, warm=0)
            tables.append(Table(title=title, unit="ms", base=OFF, values=taken[title], differences=True))
    return Findings(tables=tables, notes=notes)


def _timed(module: str, title: str, variables: Mapping[str, str]) -> Case:
    return lambda: {title: processes.run([MAIN, "-c", f"import {module}"], variables).cpu_s * 1e3}
