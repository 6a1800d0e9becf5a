"""Steps from a trainer's counter."""

from __future__ import annotations

from pathlib import Path

from tests.support.helpers import Python, spans
from tests.support.recipe_texts import recipe

TRAINER = """
class Trainer:
    def fit(self, last):
        while self.global_steps <= last:
            self.train()
            self.global_steps += 1
    def train(self): pass
class Copy(Trainer):
    def fit(self, last):
        self.global_steps = 0
        self.global_steps = 4000
        self.global_steps += 1
        super().fit(last)
"""
RECIPE = recipe(
    "trainer",
    ("counter", "Trainer.global_steps", "step.counter", 'number = "value"'),
    ("train", "Trainer.train", "span", 'stage = "train", role = "trainer"'),
)


def test_a_step_is_open_from_one_increase_to_the_next(tmp_path: Path, python: Python) -> None:
    (tmp_path / "trainer.py").write_text(TRAINER)
    (tmp_path / "trainer.toml").write_text(RECIPE)
    code = """
from trainer import Copy
copy = Copy()
assert not hasattr(copy, "global_steps")
copy.fit(4002)
assert copy.global_steps == vars(copy)["global_steps"] == 4003
del copy.global_steps
assert not hasattr(copy, "global_steps")
"""
    python(code, AUTOPROF="1", AUTOPROF_RECIPES=str(tmp_path / "trainer.toml"), PYTHONPATH=str(tmp_path))
    (timeline,) = tmp_path.glob("autoprof_runs/latest/journal/*.jsonl")
    assert [(span["kind"], span["step"]) for span in spans(timeline)] == [
        ("stage", 4001),
        ("step", 4001),
        ("stage", 4002),
        ("step", 4002),
    ]


def test_counting_beyond_the_last_step_ends_it(tmp_path: Path, python: Python) -> None:
    (tmp_path / "trainer.py").write_text(TRAINER)
    (tmp_path / "trainer.toml").write_text(RECIPE.replace('number = "value"', 'number = "value", last = "self.last"'))
    code = """
import json, time
from trainer import Copy
copy = Copy()
copy.last = 4002
copy.fit(4002)
ended = time.time_ns()
copy.global_steps += 1
print(ended)
"""
    variables = {"AUTOPROF_RECIPES": str(tmp_path / "trainer.toml"), "PYTHONPATH": str(tmp_path)}
    ended = int(python(code, AUTOPROF="1", **variables).stdout)
    (timeline,) = tmp_path.glob("autoprof_runs/latest/journal/*.jsonl")
    steps = {span["step"]: span["end_ns"] for span in spans(timeline) if span["kind"] == "step"}
    assert sorted(steps) == [4001, 4002]
    assert steps[4002] <= ended
