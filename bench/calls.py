"""Cost of a call of a hooked function outside of windows

The hooked function is a method that returns its argument, or an awaited coroutine function that does. Each case runs in
a separate process. The whole call is measured, with the loop around it. A recipe puts autoprof's wrapper around the
function, in a process with autoprof on, in a step without a capture. A `stage.pass` hook is called in every forward
pass. It is measured outside and inside of a stage that counts passes. A `stage` hook is called a few times per step. It
writes a span to the timeline, which is a line in a file.

The peers are OpenTelemetry's span with an SDK that has no processor, OpenTelemetry's span with the API alone, ddtrace's
wrapper, which replaces the code of the function, and ddtrace's span, which a filter drops.

The last table has the instructions of a call of the function, which callgrind counts: the difference between processes
with few and with many calls, with `PYTHONHASHSEED=0` and without garbage collection. Work of the system, such as a
write, is not counted. A quick run leaves this table out.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

from bench import processes
from bench.paired import Case, Goal, Table, in_turns
from bench.processes import CHILDREN, Failed, absent, there
from bench.results import Findings

TURNS, QUICK = 10, 1

PASS, STAGE = "autoprof, stage.pass", "autoprof, stage"
WRAPT, OPENTELEMETRY = "wrapt.FunctionWrapper", "OpenTelemetry, span"
COUNTED = "Instructions of a call"
# The numbers of calls of the two processes whose instructions are subtracted.
_FEW_CALLS, _MANY_CALLS = 500, 2_500
# dict from case to the peer whose environment is used (empty: the project's), and the name of the case in
# children/calls.py.
CASES = {
    "bare call": ("", "bare"),
    "closure": ("", "closure"),
    WRAPT: ("", "wrapt"),
    PASS: ("", "autoprof-pass"),
    "autoprof, stage.pass in a stage that counts": ("", "autoprof-pass-counted"),
    STAGE: ("", "autoprof-stage"),
    "OpenTelemetry, span without an SDK": ("opentelemetry", "opentelemetry-api"),
    OPENTELEMETRY: ("opentelemetry", "opentelemetry"),
    "ddtrace, wrapper": ("ddtrace", "ddtrace"),
    "ddtrace, span": ("ddtrace", "ddtrace-span"),
}
_DDTRACE = {"DD_INSTRUMENTATION_TELEMETRY_ENABLED": "false", "DD_REMOTE_CONFIGURATION_ENABLED": "false"}


def run(turns: int) -> Findings:
    """Measure a call with autoprof, and with each installed peer."""
    notes = absent(CASES)
    with tempfile.TemporaryDirectory() as folder:
        cases = {case: _measured(*python_and_name, Path(folder)) for case, python_and_name in there(CASES).items()}
        nanoseconds = in_turns(cases, turns, warm=0)
        counted = [] if turns <= QUICK else [_counted(Path(folder), notes)]
    tables = [
        Table(title=title, unit="ns", base=WRAPT, values=nanoseconds[kind])
        for kind, title in (("sync", "Function"), ("async", "Coroutine function"))
    ]
    stage_goal = Goal(
        text=f"{STAGE}, which writes two lines: at most 0.7 of {OPENTELEMETRY}, which writes none, in instructions",
        table=COUNTED,
        case=STAGE,
        base=OPENTELEMETRY,
        limit=0.7,
        remedy="fewer calls and lookups between the hook and the journal.",
    )
    return Findings(
        tables=tables + counted,
        goals=[
            Goal(
                text=f"{function_kind}, stage.pass: at most 0.4 of wrapt.FunctionWrapper",
                table=function_kind,
                case=PASS,
                limit=0.4,
                remedy="a wrapper that tests one flag and calls the function directly while its hook has nothing to "
                "do; the closure alone is the minimum.",
            )
            for function_kind in ("Function", "Coroutine function")
        ]
        + [stage_goal],
        notes=notes,
    )


def _variables(name: str, folder: Path) -> Mapping[str, str]:
    """Return the environment variables of a case: `name` as in children/calls.py, `folder` for the run directories."""
    if name.startswith("autoprof"):
        return {
            "AUTOPROF": "1",
            "AUTOPROF_RECIPES": str(CHILDREN / "toy.toml"),
            "AUTOPROF_STEPS": "1000000",
            "AUTOPROF_DIR": str(folder),
        }
    return _DDTRACE if name.startswith("ddtrace") else {}


def _measured(python: Path, name: str, folder: Path) -> Case:
    def measure() -> dict[str, float]:
        nanoseconds: dict[str, float] = json.loads(
            processes.run([python, CHILDREN / "calls.py", name], _variables(name, folder)).output
        )
        return nanoseconds

    return measure


def _counted(folder: Path, notes: list[str]) -> Table:
    """Return the table of the instructions of a call of the function, per case."""
    values = {}
    for case, (python, name) in there(CASES).items():
        line: list[str | Path] = [python, CHILDREN / "calls.py", name]
        try:
            few, many = (
                processes.instructions([*line, str(calls)], _variables(name, folder))
                for calls in (_FEW_CALLS, _MANY_CALLS)
            )
        except Failed as error:
            notes.append(f"{case}: its instructions were not counted: {str(error).splitlines()[0]}")
            continue
        values[case] = [(many - few) / (_MANY_CALLS - _FEW_CALLS)]
    return Table(title=COUNTED, unit="instructions", base=WRAPT, values=values)
