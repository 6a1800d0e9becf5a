"""Cost of the timeline

One span of a sample, from its begin until it is queued for the file. First as autoprof keeps it, with four ids and two
counts, and then with the hooked coroutine function from which autoprof reads them. It is compared with a dict written
as a line of JSON, with or without a flush (only flushed lines survive if the process is killed), and with
OpenTelemetry's span, which its batch processor exports as JSON to a file. A stage's span is written at once. For steps
that hang, autoprof notes the duration of each step and stage, and a thread checks every ten seconds.

Then a step of 512 samples, each a task with a turn and a reward: without autoprof, and with hooks on all three. The
functions do nothing, so the time is spent in loops, tasks and spans.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from bench import processes
from bench.paired import Case, Goal, Table, in_turns
from bench.processes import CHILDREN, absent, there
from bench.results import Findings

TURNS, QUICK = 10, 1

SPAN, STEP = "One span", "A step of 512 samples, 1,536 spans"
BY_HAND, KEPT = "json.dumps, a line, flushed", "autoprof, kept"
BARE, HOOKED = "no hooks", "autoprof"
# Cases: the peer whose environment is used (empty: the project's), and the case's name in children/timeline.py.
SPANS = {
    BY_HAND: ("", "json-flushed"),
    "json.dumps, a line": ("", "json"),
    KEPT: ("", "autoprof-kept"),
    "autoprof, kept, a whole call": ("", "autoprof-call"),
    "autoprof, a stage, written": ("", "autoprof-stage"),
    "autoprof, hangs, a look in 10 s": ("", "autoprof-hang-look"),
    "OpenTelemetry, batch to a file": ("opentelemetry", "opentelemetry"),
}
STEPS = {BARE: ("", "step-bare"), HOOKED: ("", "autoprof-step")}
_RUN_STEPS = 10_000
# Spans of a step without samples, by verl's driver and workers: step, stages and timers of a GRPO run.
_OTHERS = 24


def run(turns: int) -> Findings:
    """Measure all installed ways."""
    with tempfile.TemporaryDirectory() as folder:
        sizes: dict[str, float] = {}
        spans, steps = (
            in_turns(
                {case: _measured(*where, Path(folder), sizes) for case, where in there(cases).items()}, turns, warm=0
            )
            for cases in (SPANS, STEPS)
        )
    few, many = sizes["autoprof-stage"] * _OTHERS, sizes["autoprof-step"]
    return Findings(
        tables=[
            Table(title=SPAN, unit="us", base=BY_HAND, values=spans["value"]),
            Table(title=STEP, unit="ms", base=BARE, values=steps["value"], differences=True),
        ],
        goals=[
            Goal(
                text="a span that is kept, at most a line of JSON by hand",
                table=SPAN,
                case=KEPT,
                limit=1.0,
                remedy="a line that is encoded without temporary objects.",
            )
        ],
        notes=[
            f"on disk: {many / 512 / 3:.0f} bytes a span of a sample, {sizes['autoprof-stage']:.0f} a stage's",
            f"{_RUN_STEPS:,} steps of {_OTHERS} steps, stages and timers: {few * _RUN_STEPS / 1e6:.0f} MB",
            f"{_RUN_STEPS:,} steps with 512 samples in each: {(few + many) * _RUN_STEPS / 1e9:.1f} GB",
            *absent(SPANS),
        ],
    )


def _measured(python: Path, name: str, folder: Path, sizes: dict[str, float]) -> Case:
    variables = {}
    if name.startswith("autoprof"):
        variables = {
            "AUTOPROF": "1",
            "AUTOPROF_RECIPES": str(CHILDREN / "samples.toml"),
            "AUTOPROF_STEPS": "",
            "AUTOPROF_DIR": str(folder),
        }

    def measure() -> dict[str, float]:
        said: dict[str, float] = json.loads(processes.run([python, CHILDREN / "timeline.py", name], variables).output)
        sizes[name] = said.pop("bytes")
        return said

    return measure
