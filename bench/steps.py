"""Time that autoprof adds to a step of verl outside of windows

The runs are real runs on the CPU: verl 0.9's GRPO of `examples/verl_cpu` (trainer, actor, reference, vLLM). The
likeliest token is always chosen, so that all runs do the same work. "On" means `AUTOPROF=1` with a window that never
opens. The time of a run is the median of verl's own step times (`timing_s/step`), without the first step. A ratio is
taken between the two runs of a turn. The noise is the difference between the runs without autoprof.
"""

from __future__ import annotations

import re
import statistics
import sys
import tempfile
from pathlib import Path

from bench.paired import Case, Goal, Table, in_turns
from bench.processes import MAIN, ROOT, Failed, environment
from bench.results import Findings

sys.path += [str(ROOT / "tests"), str(ROOT / "tests" / "real")]

from tests.support import processes as trees

TURNS, QUICK = 2, 1
STEPS = 16
TIMEOUT_S = 420

OFF, ON = "off", "on, no window"
STEP = "Step"
_TIMED = re.compile(r"\bstep:(\d+) - .*?\btiming_s/step:([0-9.eE+-]+)")


def run(turns: int) -> Findings:
    """Measure runs with autoprof off and on."""
    on = {"AUTOPROF": "1", "AUTOPROF_STEPS": "1000000"}
    values = in_turns({OFF: _median_step({}), ON: _median_step(on)}, turns, warm=0)[STEP]
    goal = Goal(
        text="a step outside of windows, 1.00 of one without autoprof within noise",
        table=STEP,
        case=ON,
        limit=1.0,
        within_noise=True,
        remedy="fewer writes: each stage writes a line to the timeline, and asks for its step.",
    )
    return Findings(
        tables=[Table(title=STEP, unit="s", base=OFF, values=values, differences=True)],
        goals=[goal],
        notes=[f"each run: {STEPS} steps; {STEPS - 1} of them count"],
    )


def step_times(output: str) -> dict[int, float]:
    """Return the duration of each step that verl printed: dict from step number to seconds."""
    return {int(number): float(seconds) for number, seconds in _TIMED.findall(output)}


def _median_step(variables: dict[str, str]) -> Case:
    def measure() -> dict[str, float]:
        with tempfile.TemporaryDirectory() as folder:
            command = [str(ROOT / "examples" / "verl_cpu" / "run_grpo.sh"), f"trainer.total_training_steps={STEPS}"]
            environ = environment(PYTHON=str(MAIN), DETERMINISTIC="1", **variables)
            try:
                result = trees.run_framework(command, cwd=Path(folder), env=environ, timeout_s=TIMEOUT_S)
            except AssertionError as error:
                raise Failed(str(error)) from None
        seconds_by_step = step_times(result.output)
        if result.status or len(seconds_by_step) < STEPS:
            raise Failed("verl's run failed:\n" + "\n".join(result.output.splitlines()[-40:]))
        return {STEP: statistics.median(seconds for number, seconds in seconds_by_step.items() if number > 1)}

    return measure
