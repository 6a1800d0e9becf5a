"""Several trainers in one process: each has a loop, whose steps have folders and numbers of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autoprof.rundir import runs
from tests.support import helpers, small_trainer
from tests.support.helpers import Python

TRAINER = """
class Trainer:
    number = 0
    def fit(self, steps):
        for self.number in range(1, steps + 1):
            self.step()
    def resume(self, first, last):
        for self.number in range(first, last + 1):
            self.step()
    def step(self): ...
class Other(Trainer): ...
class Back(Trainer):
    def fit(self):
        super().fit(3)
        self.resume(2, 3)
def train(steps):
    Trainer().fit(steps)
"""
HOOK = '[[hook]]\nname = "{}"\nmodule = "small"\nattribute = "{}"\nbehaviour = "{}"\noptions = {{ {} }}\n'
NUMBERED = HOOK.format("step", "Trainer.step", "step.wrap", 'number = "self.number"')
COUNTED = HOOK.format("step", "Trainer.step", "step.wrap", "")
LOOPS = HOOK.format("fit", "Trainer.fit", "step.loop", "") + HOOK.format("resume", "Trainer.resume", "step.loop", "")


def steps(python: Python, folder: Path, recipe: str, code: str) -> list[tuple[int, int]]:
    """Run the code with a recipe. Return the loop and the number of each step, in order."""
    (folder / "small.py").write_text(TRAINER)
    (folder / "small.toml").write_text('target = "small"\n' + recipe)
    python(f"from small import *\n{code}", AUTOPROF="1", AUTOPROF_STEPS="", AUTOPROF_RECIPES="small.toml")
    return [(ids(span).get("loop", 1), span["step"]) for span in spans(folder)]


def spans(folder: Path) -> list[dict[str, Any]]:
    (timeline,) = (folder / "autoprof_runs").glob("2*/journal/*.jsonl")
    return [span for span in helpers.spans(timeline) if span["kind"] == "step"]


def ids(span: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = span.get("ids", {})
    return found


ONE, TWO = [(1, 1), (1, 2)], [(2, 1), (2, 2)]


@pytest.mark.parametrize(
    ("recipe", "code", "found"),
    [
        # Another object of the same class continues after a resumption.
        (NUMBERED + LOOPS, "Trainer().fit(2); Trainer().resume(3, 4)", [*ONE, (1, 3), (1, 4)]),
        # Other trainers, also if their numbers rise or are counted.
        (NUMBERED + LOOPS, "Trainer().fit(2); Other().fit(2)", ONE + TWO),
        (NUMBERED + LOOPS, "Trainer().fit(2); Trainer().resume(7, 8)", [*ONE, (2, 7), (2, 8)]),
        (COUNTED + LOOPS, "Trainer().fit(2); Trainer().fit(2)", ONE + TWO),
        # The same trainer: again from the start, or from a later step.
        (NUMBERED + LOOPS, "t = Trainer(); t.fit(1); t.fit(1)", [(1, 1), (2, 1)]),
        (NUMBERED + LOOPS, "t = Trainer(); t.fit(2); t.resume(3, 4)", [*ONE, (1, 3), (1, 4)]),
        # Without a hook for the loop, a lower number begins a loop, and the same number is the same step again.
        (NUMBERED, "Trainer().fit(2); Trainer().fit(2)", ONE + TWO),
        (NUMBERED, "Trainer().fit(2); Trainer().resume(2, 3)", [*ONE, (1, 2), (1, 3)]),
        # A function has no object.
        (NUMBERED + HOOK.format("train", "train", "step.loop", ""), "train(2); train(2)", ONE + TWO),
    ],
)
def test_each_trainer_has_a_loop(
    python: Python, tmp_path: Path, recipe: str, code: str, found: list[tuple[int, int]]
) -> None:
    assert steps(python, tmp_path, recipe, code) == found


def test_a_trainer_that_goes_back_to_an_earlier_step_keeps_its_loop(python: Python, tmp_path: Path) -> None:
    recipe = NUMBERED + HOOK.format("fit", "Back.fit", "step.loop", "")
    found = steps(python, tmp_path, recipe, "Back().fit()")
    assert found == [(1, number) for number in (1, 2, 3, 2, 3)]


def test_the_timeline_names_the_trainer_and_the_begin_of_its_loop(python: Python, tmp_path: Path) -> None:
    steps(python, tmp_path, NUMBERED + LOOPS, "Trainer().fit(1); Other().fit(2)")
    first, second, third = map(ids, spans(tmp_path))
    assert first == {"trainer": "Trainer"}
    assert second.pop("before_s") >= 0
    assert second == third == {"loop": 2, "trainer": "Other"}


@pytest.mark.parametrize("steps_of_second", [[1, 2], [2, 3]])
def test_a_script_whose_numbers_fall_begins_a_loop(python: Python, tmp_path: Path, steps_of_second: list[int]) -> None:
    code = "import autoprof\nfor number in {}:\n    with autoprof.step(number): ...\n"
    python(code.format([1, 2, 3, *steps_of_second]), AUTOPROF="1", AUTOPROF_STEPS="")
    found = [(ids(span).get("loop", 1), span["step"]) for span in spans(tmp_path)]
    assert found == [(1, 1), (1, 2), (1, 3), *((2, number) for number in steps_of_second)]


@pytest.mark.needs("torch")
def test_the_captures_of_two_loops_have_folders_of_their_own(python: Python, tmp_path: Path) -> None:
    go = small_trainer.prepare(tmp_path, python)
    go("Trainer().fit(); Trainer().fit()")
    (run,) = runs.runs(tmp_path / "autoprof_runs")
    assert [(step.loop, step.number, Path(step.folder).name) for step in run.steps] == [
        (1, 2, "global_step_000002"),
        (2, 2, "global_step_000002.loop2"),
    ]
    assert [[capture.meta.loop for capture in step.captures] for step in run.steps] == [[1], [2]]
    assert [capture.state for step in run.steps for capture in step.captures] == ["complete", "complete"]
    error = python(["-m", "autoprof", "merge", "--step", "2"], check=False)
    assert error.returncode != 0
    assert "has step 2 in loop 1 and loop 2; choose with --loop" in error.stderr
    merged = python(["-m", "autoprof", "merge", "--step", "2", "--loop", "2"]).stdout
    assert "global_step_000002.loop2/merged.pt.trace.json.gz: 1 trace, " in merged
    listed = python(["-m", "autoprof", "ls", "latest"]).stdout
    assert "2; loop 2: 2" in listed
