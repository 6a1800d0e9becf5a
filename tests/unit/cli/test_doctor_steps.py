"""`autoprof doctor RUN`: what it says about hooks and about steps does not contradict."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support import helpers
from tests.support.helpers import Autoprof

TRAINER = """
class Trainer:
    def train_step(self): self.update()
    def update(self): pass
"""
WRAP = '{ name = "step", attribute = "Trainer.train_step", behaviour = "step.wrap"'
BEGIN = '{ name = "step", attribute = "Trainer.train_step", behaviour = "step.begin"'
STAGE = (
    '{ name = "update", attribute = "Trainer.update", behaviour = "stage", options = { stage = "u", role = "actor" }'
)


def problems(autoprof: Autoprof, folder: Path, hooks: str, code: str, **variables: str) -> list[str]:
    """Return the problems that doctor finds in a run of this code."""
    (folder / "tiny.py").write_text(TRAINER)
    (folder / "tiny.toml").write_text(f'target = "tiny"\nhook = [{hooks} }}]\n')
    (folder / "train.py").write_text(f"from tiny import *\n{code}\n")
    known = {"AUTOPROF": "1", "AUTOPROF_STEPS": "", "AUTOPROF_RECIPES": "tiny.toml"}
    helpers.run([sys.executable, "train.py"], cwd=folder, **known | variables)
    done = autoprof("doctor", "latest", "--json", "--dir", str(folder / "autoprof_runs"))
    found: list[str] = json.loads(done.stdout)["problems"]
    assert done.returncode == bool(found)
    return found


@pytest.mark.parametrize(
    ("hooks", "code", "expected"),
    [
        (f"{WRAP} }}, {STAGE}", "Trainer().train_step()", []),
        (f"{BEGIN} }}, {STAGE}", "t = Trainer(); t.train_step(); t.train_step()", []),
        (
            f"{BEGIN} }}, {STAGE}",
            "Trainer().train_step()",
            ["no step was recorded: a step began, but its process exited before the step ended; add a hook with"],
        ),
        (
            STAGE,
            "Trainer().train_step()",
            ["no step was recorded: no hook that fired begins steps: tiny/update; --all lists the hooks"],
        ),
        (f"{WRAP} }}, {STAGE}", "", ["no step was recorded: no hook fired; --all lists the hooks"]),
        (
            WRAP + ', options = { number = "self.gone" }',
            "Trainer().train_step()",
            ["train.py", "no step was recorded: a hook that fired has failed: tiny/step"],
        ),
    ],
)
def test_a_run_without_steps_has_one_reason(
    autoprof: Autoprof, tmp_path: Path, hooks: str, code: str, expected: list[str]
) -> None:
    found = problems(autoprof, tmp_path, hooks, code)
    assert len(found) == len(expected)
    assert all(text in line for text, line in zip(expected, found, strict=True)), found


def test_a_step_without_a_stage_has_nothing_to_capture(autoprof: Autoprof, tmp_path: Path) -> None:
    code = "Trainer().train_step(); Trainer().train_step()"
    expected = "step 2 was asked for and executed, but no stage ran in it, so there is nothing to capture"
    assert problems(autoprof, tmp_path, WRAP, code, AUTOPROF_STEPS="2") == [expected]
