"""`autoprof doctor RUN`: what it says about hooks and about steps does not contradict."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.helpers import Autoprof
from tests.support.recipe_texts import Hook
from tests.support.small_trainer import UPDATE, plain

WRAP = ("step", "Trainer.step", "step.wrap", "")
BEGIN = ("step", "Trainer.step", "step.begin", "")


def problems(autoprof: Autoprof, folder: Path, hooks: list[Hook], code: str, **variables: str) -> list[str]:
    """Return the problems that doctor finds in a run of this code."""
    plain(folder, f"from small import *\n{code}\n", hooks=hooks, **variables)
    done = autoprof("doctor", "latest", "--json", "--dir", str(folder / "autoprof_runs"))
    found: list[str] = json.loads(done.stdout)["problems"]
    assert done.returncode == bool(found)
    return found


@pytest.mark.parametrize(
    ("hooks", "code", "expected"),
    [
        ([WRAP, UPDATE], "Trainer().step()", []),
        ([BEGIN, UPDATE], "t = Trainer(); t.step(); t.step()", []),
        (
            [BEGIN, UPDATE],
            "Trainer().step()",
            ["no step was recorded: a step began, but its process exited before the step ended; add a hook with"],
        ),
        (
            [UPDATE],
            "Trainer().step()",
            ["no step was recorded: no hook that fired begins steps: small/update; --all lists the hooks"],
        ),
        ([WRAP, UPDATE], "", ["no step was recorded: no hook fired; --all lists the hooks"]),
        (
            [("step", "Trainer.step", "step.wrap", 'number = "self.gone"')],
            "Trainer().step()",
            ["train.py", "no step was recorded: a hook that fired has failed: small/step"],
        ),
    ],
)
def test_a_run_without_steps_has_one_reason(
    autoprof: Autoprof, tmp_path: Path, hooks: list[Hook], code: str, expected: list[str]
) -> None:
    found = problems(autoprof, tmp_path, hooks, code)
    assert len(found) == len(expected)
    assert all(text in line for text, line in zip(expected, found, strict=True)), found


def test_a_step_without_a_stage_has_nothing_to_capture(autoprof: Autoprof, tmp_path: Path) -> None:
    code = "Trainer().step(); Trainer().step()"
    expected = "step 2 was asked for and executed, but no stage ran in it, so there is nothing to capture"
    assert problems(autoprof, tmp_path, [WRAP], code, AUTOPROF_STEPS="2") == [expected]
