"""Cost of a call of a hooked function outside of windows

A method that returns its argument, and the same as an awaited coroutine function. Each case runs in a separate process.
The whole call is measured, with the loop around it. autoprof's wrappers are put there by a recipe, in a process with
autoprof on, in a step without a capture. A `stage.pass` hook is called in every forward pass; it is measured outside
and inside of a stage that counts passes. A `stage` hook is called a few times per step and writes a span to the
timeline, a line in a file.

Peers: OpenTelemetry's span with an SDK without a processor, and with the API alone; ddtrace's wrapper, which replaces
the function's code, and ddtrace's span, which a filter drops.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

from bench import processes
from bench.paired import Case, Goal, Table, in_turns
from bench.processes import CHILDREN, absent, there
from bench.results import Findings

TURNS, QUICK = 10, 1

PASS, WRAPT = "autoprof, stage.pass", "wrapt.FunctionWrapper"
# Cases: the peer whose environment is used (empty: the project's), and the case's name in children/calls.py.
CASES = {
    "bare call": ("", "bare"),
    "closure": ("", "closure"),
    WRAPT: ("", "wrapt"),
    PASS: ("", "autoprof-pass"),
    "autoprof, stage.pass in a stage that counts": ("", "autoprof-pass-counted"),
    "autoprof, stage": ("", "autoprof-stage"),
    "OpenTelemetry, span without an SDK": ("opentelemetry", "opentelemetry-api"),
    "OpenTelemetry, span": ("opentelemetry", "opentelemetry"),
    "ddtrace, wrapper": ("ddtrace", "ddtrace"),
    "ddtrace, span": ("ddtrace", "ddtrace-span"),
}
_DDTRACE = {"DD_INSTRUMENTATION_TELEMETRY_ENABLED": "false", "DD_REMOTE_CONFIGURATION_ENABLED": "false"}


def run(turns: int) -> Findings:
    """Measure all installed peers."""
    with tempfile.TemporaryDirectory() as folder:
        cases = {case: _measured(*where, Path(folder)) for case, where in there(CASES).items()}
        taken = in_turns(cases, turns, warm=0)
    return Findings(
        tables=[
            Table(title=title, unit="ns", base=WRAPT, values=taken[kind])
            for kind, title in (("sync", "Function"), ("async", "Coroutine function"))
        ],
        goals=[
            Goal(
                text=f"{what}, stage.pass: at most 0.4 of wrapt.FunctionWrapper",
                table=what,
                case=PASS,
                limit=0.4,
                remedy="a wrapper that tests one flag and calls the function directly while its hook has nothing to "
                "do; the closure alone is the minimum.",
            )
            for what in ("Function", "Coroutine function")
        ],
        notes=absent(CASES),
    )


def _measured(python: Path, name: str, folder: Path) -> Case:
    variables: Mapping[str, str] = _DDTRACE if name.startswith("ddtrace") else {}
    if name.startswith("autoprof"):
        variables = {
            "AUTOPROF": "1",
            "AUTOPROF_RECIPES": str(CHILDREN / "toy.toml"),
            "AUTOPROF_STEPS": "1000000",
            "AUTOPROF_DIR": str(folder),
        }

    def measure() -> dict[str, float]:
        said: dict[str, float] = json.loads(processes.run([python, CHILDREN / "calls.py", name], variables).output)
        return said

    return measure
