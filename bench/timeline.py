"""Cost of the timeline

One span of a sample, from its begin to where it is on its way to the file: as autoprof keeps it, with four ids and two
counts; by a wrapped coroutine function, from which it reads them; and what else is done for it: a dict that is written
as a line of JSON, flushed (which a process that is killed leaves) or not, and OpenTelemetry's span, which its batch
processor exports as JSON to a file. A stage's span is written at once. The watch for steps that hang notes what each
step and stage took, and a thread looks once in ten seconds.

Then a step of 512 samples, each a task with a turn and a reward in it: without autoprof, and with its hooks on all
three. What they do takes no time, so all that is measured is loops, tasks, and spans.
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
# By case: the environment that it runs in, and what children/timeline.py calls it.
SPANS = {
    BY_HAND: ("", "json-flushed"),
    "json.dumps, a line": ("", "json"),
    KEPT: ("", "autoprof-kept"),
    "autoprof, kept, a whole call": ("", "autoprof-call"),
    "autoprof, a stage, written": ("", "autoprof-stage"),
    "autoprof, hangs, a stage": ("", "autoprof-hang-note"),
    "autoprof, hangs, a look in 10 s": ("", "autoprof-hang-look"),
    "OpenTelemetry, batch to a file": ("opentelemetry", "opentelemetry"),
}
STEPS = {BARE: ("", "step-bare"), HOOKED: ("", "autoprof-step")}
_RUN_STEPS = 10_000
# What verl's driver and workers write in a step besides samples: steps, stages and timers of a GRPO run.
_OTHERS = 24


def run(turns: int) -> Findings:
    """Measure the ways that are there."""
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
                remedy="a line that is made without objects in between.",
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
