"""Cost of the timeline

The first table has the cost of one span of a sample, from the begin of the span until it is queued for the file. The
span is measured alone, with four ids and two counts, and together with the hooked coroutine function from which
autoprof reads the ids and counts. The cost is compared with a dict that is written as a line of JSON, with and without
a flush (only flushed lines survive if the process is killed), and with OpenTelemetry's span, which its batch processor
exports as JSON to a file. The span of a stage is written at once. To find steps that hang, autoprof notes the duration
of each step and stage, and a thread checks the durations every ten seconds.

The second table has the time of a step of 512 samples, without autoprof and with hooks. Each sample is a task with a
turn and a reward. The sample, the turn and the reward are hooked. The functions do nothing, so the time is spent in
loops, tasks and spans.

The third table has the CPU time of a process in a second of a step in which the program does nothing, with 21 threads
in deep stacks. It is compared with a thousandth of a core. While no stage is open, autoprof's thread samples the stack
of the program's main thread. While a stage is open, it only wakes once per second, as without these samples.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from bench import processes
from bench.paired import Case, Goal, Table, in_turns
from bench.processes import CHILDREN, MAIN, absent, there
from bench.results import Findings

TURNS, QUICK = 10, 1

SPAN, STEP, IDLE = "One span", "A step of 512 samples, 1,536 spans", "A second of a process that waits"
BY_HAND, KEPT = "json.dumps, a line, flushed", "autoprof, kept"
BARE, HOOKED = "no hooks", "autoprof"
# dict from case to the peer whose environment is used (empty: the project's), and the name of the case in
# children/timeline.py.
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
THOUSANDTH, GAP = "0.1 % of a core", "autoprof, no stage is open"
# As above, with the value of AUTOPROF_GAP_STACKS.
WAITS = {
    "no autoprof": ("bare-idle", "1"),
    "autoprof, a stage is open": ("autoprof-open", "1"),
    "autoprof, a stage is open, no samples": ("autoprof-open", "0"),
    GAP: ("autoprof-gap", "1"),
    "autoprof, no stage is open, no samples": ("autoprof-gap", "0"),
}
_RUN_STEPS = 10_000
# Number of spans in a step of a GRPO run of verl, except the spans of samples: the step, the stages and the timers of
# the driver and the workers.
_OTHERS = 24


def run(turns: int) -> Findings:
    """Measure autoprof, JSON by hand, and each installed peer."""
    with tempfile.TemporaryDirectory() as folder:
        sizes: dict[str, float] = {}
        spans, steps = (
            in_turns(
                {
                    case: _measured(*python_and_name, Path(folder), sizes)
                    for case, python_and_name in there(cases).items()
                },
                turns,
                warm=0,
            )
            for cases in (SPANS, STEPS)
        )
        waits = in_turns(
            {THOUSANDTH: lambda: {"value": 1000.0}}
            | {case: _measured(MAIN, name, Path(folder), {}, samples) for case, (name, samples) in WAITS.items()},
            turns,
            warm=0,
        )
    step_bytes, sample_bytes = sizes["autoprof-stage"] * _OTHERS, sizes["autoprof-step"]
    return Findings(
        tables=[
            Table(title=SPAN, unit="us", base=BY_HAND, values=spans["value"]),
            Table(title=STEP, unit="ms", base=BARE, values=steps["value"], differences=True),
            Table(title=IDLE, unit="us", base=THOUSANDTH, values=waits["value"]),
        ],
        goals=[
            Goal(
                text="samples of the stack while no stage is open: at most 0.1 % of a core",
                table=IDLE,
                case=GAP,
                limit=1.0,
                remedy="fewer samples: the time between two grows with their cost.",
            ),
            Goal(
                text="a span that is kept, at most a line of JSON by hand",
                table=SPAN,
                case=KEPT,
                limit=1.0,
                remedy="a line that is encoded without temporary objects.",
            ),
        ],
        notes=[
            f"on disk: {sample_bytes / 512 / 3:.0f} bytes a span of a sample, {sizes['autoprof-stage']:.0f} a stage's",
            f"{_RUN_STEPS:,} steps of {_OTHERS} steps, stages and timers: {step_bytes * _RUN_STEPS / 1e6:.0f} MB",
            f"{_RUN_STEPS:,} steps with 512 samples in each: {(step_bytes + sample_bytes) * _RUN_STEPS / 1e9:.1f} GB",
            *absent(SPANS),
        ],
    )


def _measured(python: Path, name: str, folder: Path, sizes: dict[str, float], samples: str = "1") -> Case:
    variables = {}
    if name.startswith("autoprof"):
        variables = {
            "AUTOPROF": "1",
            "AUTOPROF_RECIPES": str(CHILDREN / "samples.toml"),
            "AUTOPROF_STEPS": "",
            "AUTOPROF_DIR": str(folder),
            "AUTOPROF_GAP_STACKS": samples,
        }

    def measure() -> dict[str, float]:
        result: dict[str, float] = json.loads(processes.run([python, CHILDREN / "timeline.py", name], variables).output)
        sizes[name] = result.pop("bytes")
        return result

    return measure
