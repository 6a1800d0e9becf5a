"""Memory that autoprof adds to a process

Two values are measured: the private memory at the end of a process (`Anonymous` in `/proc/self/smaps_rollup`), and the
peak of its memory, including mapped files (`VmHWM`). The first tables are about interpreters that do nothing, with each
peer in a separate environment. The other tables are about processes that have imported a target.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from autoprof._boot import FOUND, RUN_ID
from bench import processes
from bench.boot import under
from bench.paired import Case, Table, in_turns
from bench.processes import MAIN, absent, there
from bench.results import Findings

TURNS, QUICK = 5, 1

BARE = "not installed"
OFF = "off"
MODULES = ("torch, verl.trainer.main_ppo",)

_PRINT = """
for path in "/proc/self/smaps_rollup", "/proc/self/status":
    with open(path) as file:
        print(file.read())
"""
_OWN, _PEAK = "Private memory", "Peak of memory"


def run(turns: int) -> Findings:
    """Measure the memory with each installed peer, and of each installed target with autoprof."""
    peers = {
        BARE: ("bare", {}),
        "autoprof, off": ("autoprof", {}),
        "autoprof, on": ("autoprof", {"AUTOPROF": "1"}),
        "OpenTelemetry": ("opentelemetry", under("opentelemetry")),
        "ddtrace": ("ddtrace", under("ddtrace")),
    }
    notes = absent(peers)
    cases = {case: _measured(*where) for case, where in there(peers).items()}
    tables = _tables(cases, turns, BARE, "an interpreter that does nothing") if BARE in cases else []
    with tempfile.TemporaryDirectory() as folder:
        run_variables = {"AUTOPROF": "1", "AUTOPROF_DIR": folder}
        for module in MODULES:
            import_cases = {
                OFF: _measured(MAIN, {}, module),
                "on, starts a run": _measured(MAIN, run_variables, module),
                "on, in a child": _measured(MAIN, {**run_variables, RUN_ID: "bench", FOUND: sys.prefix}, module),
            }
            try:
                tables += _tables(import_cases, min(turns, 3), OFF, f"import {module}")
            except processes.Failed:
                notes.append(f"{module} can't be imported here")
    return Findings(tables=tables, notes=notes)


def _tables(cases: Mapping[str, Case], turns: int, base: str, what: str) -> list[Table]:
    megabytes = in_turns(cases, turns, warm=0)
    return [
        Table(title=f"{kind}: {what}", unit="MB", base=base, values=megabytes[kind], differences=True)
        for kind in (_OWN, _PEAK)
    ]


def _measured(python: Path, variables: Mapping[str, str], modules: str = "") -> Case:
    code = f"import {modules}\n{_PRINT}" if modules else _PRINT

    def measure() -> dict[str, float]:
        output = processes.run([python, "-c", code], variables).output
        fields = {name: words.split() for name, _, words in (line.partition(":") for line in output.splitlines())}
        kilobytes = {name: int(words[0]) for name, words in fields.items() if words[1:] == ["kB"]}
        return {_OWN: kilobytes["Anonymous"] * 1.024e-3, _PEAK: kilobytes["VmHWM"] * 1.024e-3}

    return measure
