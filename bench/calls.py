"""Cost of a call of a hooked function outside of windows

The hooked function is a method that returns its argument, or an awaited coroutine function that does. Each case runs in
a separate process. The whole call is measured, with the loop around it. A recipe puts autoprof's wrapper around the
function, in a process with autoprof on, in a step without a capture. A `stage.pass` hook is called in every forward
pass. It is measured outside and inside of a stage that counts passes. A `stage` hook is called a few times per step. It
writes a span to the timeline, which is a line in a file.

The peers are OpenTelemetry's span with an SDK that has no processor, OpenTelemetry's span with the API alone, ddtrace's
wrapper, which replaces the code of the function, and ddtrace's span, which a filter drops.
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
# dict from case to the peer whose environment is used (empty: the project's), and the name of the case in
# children/calls.py.
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
    """Measure a call with autoprof, and with each installed peer."""
    with tempfile.TemporaryDirectory() as folder:
        cases = {case: _measured(*python_and_name, Path(folder)) for case, python_and_name in there(CASES).items()}
        nanoseconds = in_turns(cases, turns, warm=0)
    return Findings(
        tables=[
            Table(title=title, unit="ns", base=WRAPT, values=nanoseconds[kind])
            for kind, title in (("sync", "Function"), ("async", "Coroutine function"))
        ],
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
        nanoseconds: dict[str, float] = json.loads(
            processes.run([python, CHILDREN / "calls.py", name], variables).output
        )
        return nanoseconds

    return measure
