"""Ctrl-C in autoprof's own code, in a program that catches it and continues."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import helpers, interrupted
from tests.support.helpers import wait_for
from tests.support.recipe_texts import recipe

SMALL = """
class Wrapped:
    number = 0
    def train_step(self):
        self.number += 1
        self.update()
        self.sample()
        self.evaluate()
    def update(self):
        for _ in range(2):
            self.batch()
    def batch(self):
        return sum(range(100))
    def sample(self):
        return 1
    def evaluate(self):
        return self.sample()
class Paired:
    number = 0
    def train_step(self):
        self.number += 1
        self.begin()
        self.open()
        sum(range(100))
        self.close()
        self.end()
    def begin(self): pass
    def end(self): pass
    def open(self): pass
    def close(self): pass
"""
RECIPE = recipe(
    "small",
    ("step", "Wrapped.train_step", "step.wrap", 'number = "self.number"'),
    ("update", "Wrapped.update", "stage", 'stage = "update", role = "actor", mini_batches = true'),
    ("batch", "Wrapped.batch", "stage.mini-batch", ""),
    (
        "sample",
        "Wrapped.sample",
        "span",
        'stage = "sample", role = "rollout", kind = "sample", ids = { number = "self.number" }',
    ),
    ("evaluate", "Wrapped.evaluate", "span", 'stage = "evaluate", role = "trainer", whole = true'),
    ("begin", "Paired.begin", "step.begin", 'number = "self.number"'),
    ("end", "Paired.end", "step.end", ""),
    ("open", "Paired.open", "stage.begin", 'stage = "update", role = "actor", of = "self"'),
    ("close", "Paired.close", "stage.end", 'of = "self"'),
)


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """Run the program. Return the number of interrupts, and the errors after them."""

    def run(*arguments: str, steps: str, **variables: str) -> tuple[int, list[str]]:
        (tmp_path / "small.py").write_text(SMALL)
        (tmp_path / "small.toml").write_text(RECIPE)
        environment = {"AUTOPROF": "1", "AUTOPROF_RECIPES": "small.toml", "AUTOPROF_STEPS": steps}
        environment |= {"AUTOPROF_CONTENTS": "cpu", "AUTOPROF_MAX_STEPS": "1000000", "AUTOPROF_RUN_ID": "made"}
        command = [sys.executable, interrupted.__file__, *arguments]
        environment |= {"PYTHONPATH": str(tmp_path)} | variables
        done = helpers.run(command, cwd=tmp_path, timeout_s=1800, **environment)
        assert done.returncode == 0, done.stderr[-5000:]
        *wrong, figures = done.stdout.splitlines()
        found = re.match(r"interrupted=(\d+) ", figures)
        assert found is not None
        return int(found[1]), wrong

    return run


def last_states(tmp_path: Path, count: int) -> list[str]:
    """Return the states of the last captures."""
    folders = sorted((tmp_path / "autoprof_runs" / "made").glob("global_step_*"))[-count:]
    metas = [next(folder.glob("*.meta.json")) for folder in folders]
    traces = [next(folder.glob("*.pt.trace.json.gz"), None) for folder in folders]
    assert None not in traces
    return [json.loads(wait_for(meta))["state"] for meta in metas]


@pytest.mark.fault("Ctrl-C at any line of autoprof's, no window", "as without autoprof", "the step")
@pytest.mark.parametrize(
    ("arguments", "stride"),
    [
        (["lines"], 3),
        (["lines", "--trainer", "Paired"], 3),
        (["lines", "--alarm", "Alarm"], 13),
        (["lines", "--alarm", "TimeoutError", "--libraries"], 13),
        (["lines", "--alarm", "ConnectionError", "--libraries"], 13),
        (["lines", "--alarm", "TimeoutError", "--libraries", "--trainer", "Paired"], 3),
        (["opcodes"], 3),
    ],
    ids=["lines", "pairs", "alarms", "timeouts", "lost connections", "timeouts in pairs", "between lines"],
)
def test_without_a_window_nothing_is_left_of_an_interrupted_step(
    run: Any, request: pytest.FixtureRequest, arguments: list[str], stride: int
) -> None:
    stride = 3 if request.config.getoption("thorough") else stride
    interrupts, wrong = run(*arguments, "--stride", str(stride), "--patience", "1700", steps="")
    assert interrupts > 100
    assert wrong == []


@pytest.mark.fault("Ctrl-C at any line of autoprof's in a window", "the program goes on", "the captures that it hits")
@pytest.mark.parametrize("mode", ["discrete", "continuous"])
@pytest.mark.parametrize("trainer", ["Wrapped", "Paired"])
def test_nothing_records_after_an_interrupt_in_a_window(
    run: Any, tmp_path: Path, request: pytest.FixtureRequest, trainer: str, mode: str
) -> None:
    stride = "1" if request.config.getoption("thorough") else "31"
    arguments = ("lines", "--torch", "--trainer", trainer, "--stride", stride, "--patience", "1700")
    interrupts, wrong = run(*arguments, steps="::1", AUTOPROF_MODE=mode)
    assert interrupts > 20
    assert wrong == []
    assert last_states(tmp_path, 3) == ["complete"] * 3


@pytest.mark.fault("an alarm at any line in a window", "it reaches the program", "the captures that it hits")
@pytest.mark.parametrize("mode", ["discrete", "continuous"])
@pytest.mark.parametrize("alarm", interrupted.ALARMS)
def test_no_alarm_in_a_window_is_lost_in_autoprof_or_the_libraries_it_calls(
    run: Any, request: pytest.FixtureRequest, alarm: str, mode: str
) -> None:
    if (mode == "continuous") != (alarm == "TimeoutError"):
        request.getfixturevalue("thorough")
    stride = "1" if request.config.getoption("thorough") else "31"
    arguments = ("lines", "--torch", "--alarm", alarm, "--libraries", "--stride", stride)
    interrupts, wrong = run(*arguments, "--patience", "1700", steps="::1", AUTOPROF_MODE=mode)
    assert interrupts > 20
    assert wrong == []


@pytest.mark.fault("Ctrl-C at random moments", "the program goes on", "the captures that it hits")
@pytest.mark.parametrize("steps", ["", "::2"], ids=["no window", "windows"])
def test_interrupts_at_random_moments(run: Any, tmp_path: Path, request: pytest.FixtureRequest, steps: str) -> None:
    count = "1000" if request.config.getoption("thorough") else "50"
    interrupts, wrong = run("moments", "--torch", "--count", count, "--patience", "1700", steps=steps)
    assert interrupts > 10
    assert wrong == []
    if steps:
        assert last_states(tmp_path, 1) == ["complete"]
