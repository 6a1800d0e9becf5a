"""Start-up time that autoprof adds to a Python interpreter

Whole processes that do nothing are measured. Each peer has a separate environment without pip, so that an interpreter
runs the `.pth` file of one peer only. autoprof is installed as the wheel of this checkout. CPU time is the user and
system time of a process. Instructions are counted by callgrind with `PYTHONHASHSEED=0`, and do not vary.

The commands `opentelemetry-instrument` and `ddtrace-run` first run another interpreter, then the program's. The rows
"in each process" are the cost of each interpreter that these commands start. autoprof should be compared with these
rows. Exporters, telemetry and remote configuration, which need a server, are off in both peers.

The process that starts a run searches once for recipes of other distributions, when it first imports a package outside
of the standard library. The children of this process get the result of the search. The last table has the cost of the
search: processes import msgspec in the environment of the real targets.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from autoprof._boot import FOUND, RUN_ID
from bench import processes
from bench.paired import Case, Goal, Table, in_turns
from bench.processes import MAIN, Failed, interpreter, missing, site_packages
from bench.results import Findings

TURNS, QUICK = 25, 2

BARE, OFF, ON = "not installed", "autoprof, off", "autoprof, on"
CPU, COUNTED, FIRST = "CPU time", "Instructions", "CPU time of a start that imports an installed package"
_NO_SERVER = {
    "opentelemetry": {f"OTEL_{kind}_EXPORTER": "none" for kind in ("TRACES", "METRICS", "LOGS")},
    "ddtrace": {"DD_INSTRUMENTATION_TELEMETRY_ENABLED": "false", "DD_REMOTE_CONFIGURATION_ENABLED": "false"},
}
_BOOTSTRAPS = {
    "opentelemetry": "opentelemetry/instrumentation/auto_instrumentation",
    "ddtrace": "ddtrace/bootstrap",
}


@dataclass(frozen=True)
class Start:
    """A way to start a process: by the interpreter of a peer, or by a command of the peer that starts the interpreter.

    Attributes:
        repeats: Number of starts in a turn. The result is their mean. Short starts need more repeats.
    """

    peer: str
    variables: Mapping[str, str] = field(default_factory=dict)
    command: str = ""
    code: str = "pass"
    repeats: int = 5

    def line(self, python: Path) -> list[str]:
        """Return the command line that starts the process."""
        command_words = [str(python.parent / self.command)] if self.command else []
        return [*command_words, str(python), "-c", self.code]


def starts(folder: Path) -> dict[str, Start]:
    """Return the ways to start a process, by case. coverage writes its data into `folder`."""
    settings = folder / "coveragerc"
    settings.write_text(f"[run]\ndata_file = {folder}/data\n")
    return {
        BARE: Start("bare"),
        OFF: Start("autoprof"),
        "autoprof, off by AUTOPROF=0": Start("autoprof", {"AUTOPROF": "0"}),
        ON: Start("autoprof", {"AUTOPROF": "1"}),
        "autoprof, on, in the children": Start("autoprof", {"AUTOPROF": "1", **_child("autoprof")}),
        "import logging": Start("bare", code="import logging"),
        "import wrapt": Start("autowrapt", code="import wrapt"),
        "autowrapt, off": Start("autowrapt"),
        "autowrapt, on": Start("autowrapt", {"AUTOWRAPT_BOOTSTRAP": "none"}),
        "coverage, off": Start("coverage"),
        "coverage, on": Start("coverage", {"COVERAGE_PROCESS_START": str(settings)}, repeats=1),
        "OpenTelemetry, in each process": Start("opentelemetry", under("opentelemetry"), repeats=1),
        "opentelemetry-instrument": Start(
            "opentelemetry", _NO_SERVER["opentelemetry"], "opentelemetry-instrument", repeats=1
        ),
        "ddtrace, in each process": Start("ddtrace", under("ddtrace"), repeats=1),
        "ddtrace-run": Start("ddtrace", _NO_SERVER["ddtrace"], "ddtrace-run", repeats=1),
    }


def under(peer: str) -> dict[str, str]:
    """Return the environment variables that the command of a peer sets for the processes that it starts."""
    python = interpreter(peer)
    path = {"PYTHONPATH": str(site_packages(python) / _BOOTSTRAPS[peer])} if python else {}
    return _NO_SERVER[peer] | path


def run(turns: int) -> Findings:
    """Measure the start-up time of all installed peers."""
    with tempfile.TemporaryDirectory() as name:
        cases = starts(Path(name))
        notes = [
            missing(peer) for peer in dict.fromkeys(start.peer for start in cases.values()) if not interpreter(peer)
        ]
        installed_cases = {case: start for case, start in cases.items() if interpreter(start.peer)}
        tables = []
        if BARE in installed_cases:
            cpu_times = in_turns({case: _timed(start) for case, start in installed_cases.items()}, turns, warm=2)
            tables.append(Table(title=CPU, unit="ms", base=BARE, values=cpu_times[CPU]))
        if BARE in installed_cases and shutil.which("valgrind"):
            tables.append(_counted(installed_cases, notes))
        elif BARE in installed_cases:
            notes.append("instructions were not counted: valgrind is not installed")
        tables.append(_first_imports(turns))
    return Findings(tables=tables, goals=_GOALS, notes=notes)


def _timed(start: Start) -> Case:
    python = interpreter(start.peer)
    assert python is not None
    line = start.line(python)

    def measure() -> dict[str, float]:
        seconds = [processes.run(line, start.variables).cpu_s for _ in range(start.repeats)]
        return {CPU: sum(seconds) / len(seconds) * 1e3}

    return measure


def _counted(cases: Mapping[str, Start], notes: list[str]) -> Table:
    """Return the table of the instructions of one start per case. Further starts take the same number.

    Cases with a command are left out, because callgrind stops counting when the command becomes the program.
    """
    values = {}
    for case, start in cases.items():
        python = interpreter(start.peer)
        if start.command or python is None:
            continue
        try:
            values[case] = [processes.instructions(start.line(python), start.variables) / 1e6]
        except Failed as error:
            notes.append(f"{case}: its instructions were not counted: {str(error).splitlines()[0]}")
    return Table(title=COUNTED, unit="million", base=BARE, values=values)


def _first_imports(turns: int) -> Table:
    cases = {
        "import msgspec": {},
        "the same, on, starts a run": {"AUTOPROF": "1"},
        "the same, on, in its children": {"AUTOPROF": "1", RUN_ID: "x", FOUND: sys.prefix},
    }

    def timed(variables: Mapping[str, str]) -> Case:
        return lambda: {
            FIRST: sum(processes.run([MAIN, "-c", "import msgspec"], variables).cpu_s for _ in range(5)) * 200
        }

    cpu_times = in_turns({case: timed(variables) for case, variables in cases.items()}, turns, warm=2)
    return Table(title=FIRST, unit="ms", base="import msgspec", values=cpu_times[FIRST])


def _child(peer: str) -> dict[str, str]:
    python = interpreter(peer)
    return {RUN_ID: "x", FOUND: os.path.realpath(python.parent.parent) if python else ""}


_GOALS = [
    Goal(
        text="off, at most 1.01 of not installed, in instructions",
        table=COUNTED,
        case=OFF,
        limit=1.01,
        remedy="`site` opens every `.pth` file, and compiles and runs its line. An empty file costs 0.4 %, a file with "
        "`import os` 0.8 %. The cheapest line found only tests whether `AUTOPROF` is set and then imports a module: "
        "1.2 to 1.3 %.",
    ),
    Goal(text="off, at most 1.01 of not installed, in CPU time", table=CPU, case=OFF, limit=1.01, remedy="as above."),
    Goal(
        text="on with no target, at most 1.15 of not installed, in instructions",
        table=COUNTED,
        case=ON,
        limit=1.15,
        remedy="fewer imports in `_boot/`, and no listing of recipe folders before a target is imported.",
    ),
    Goal(
        text="on with no target, at most 1.35 of not installed, in CPU time",
        table=CPU,
        case=ON,
        limit=1.35,
        remedy="fewer imports in `_boot/`, and no listing of recipe folders before a target is imported.",
    ),
]
