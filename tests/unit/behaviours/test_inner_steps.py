"""Steps of engines and of loops without a trainer (`inner`). A trainer above them has priority."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import helpers
from tests.support.helpers import Python
from tests.support.recipe_texts import recipe

ENGINE = """
class Engine:
    updates = 0
    def batch(self): ...
    def update(self):
        self.updates += 1

def loop(steps=2, engine=None):
    engine = engine or Engine()
    for _ in range(steps):
        engine.batch()
        engine.batch()
        engine.update()
"""
TRAINER = """
import engine

class Trainer:
    def fit(self):
        self.made = engine.Engine()
        for number in (11, 12):
            self.step(number)
    def step(self, number):
        engine.loop(1, self.made)
"""
COUNTED = "inner = true"
NUMBERED = 'inner = true, number = "self.updates", offset = 1'
ABOVE = recipe(
    "above",
    ("step", "Trainer.step", "step.wrap", 'number = "number"'),
)
MADE = recipe(
    "above",
    ("made", "Trainer.fit", "step.trainer", ""),
)


def spans(python: Python, folder: Path, options: str, code: str, above: str = ABOVE) -> list[dict[str, Any]]:
    """Run the code, and return the spans of its timeline in the order of their ends."""
    (folder / "engine.py").write_text(ENGINE)
    (folder / "above.py").write_text(TRAINER)
    hooks = [
        ("batch-begin", "Engine.batch", "step.begin", options),
        ("batch", "Engine.batch", "stage", 'stage = "batch", role = "trainer", outermost = true'),
        ("update", "Engine.update", "step.update", ""),
    ]
    (folder / "engine.toml").write_text(recipe("engine", *hooks))
    (folder / "above.toml").write_text(above)
    recipes = f"{folder / 'engine.toml'}:{folder / 'above.toml'}"
    python(code, AUTOPROF="1", AUTOPROF_STEPS="", AUTOPROF_RECIPES=recipes)
    (timeline,) = (folder / "autoprof_runs").glob("2*/journal/*.jsonl")
    return helpers.spans(timeline)


def told(found: list[dict[str, Any]]) -> list[tuple[str, int | None]]:
    return [(span["name"], span["step"]) for span in found]


@pytest.mark.parametrize("options", [COUNTED, NUMBERED])
def test_micro_batches_until_an_update_are_one_step(python: Python, tmp_path: Path, options: str) -> None:
    found = spans(python, tmp_path, options, "import engine; engine.loop()")
    assert told(found) == [(name, number) for number in (1, 2) for name in ("batch", "batch", "step")]


def test_the_last_step_ends_with_its_update_and_not_with_the_process(python: Python, tmp_path: Path) -> None:
    code = "import engine, time\nengine.loop(1)\nafter = time.time_ns()\nopen('after', 'w').write(str(after))"
    found = spans(python, tmp_path, COUNTED, code)
    assert told(found) == [("batch", 1), ("batch", 1), ("step", 1)]
    assert found[1]["end_ns"] <= found[2]["end_ns"] <= int((tmp_path / "after").read_text())


def test_a_step_without_its_update_is_left_out(python: Python, tmp_path: Path) -> None:
    found = spans(python, tmp_path, COUNTED, "import engine; engine.Engine().batch()")
    assert told(found) == [("batch", 1)]


@pytest.mark.parametrize("options", [COUNTED, NUMBERED])
def test_a_trainer_above_makes_the_steps(python: Python, tmp_path: Path, options: str) -> None:
    found = spans(python, tmp_path, options, "import above; above.Trainer().fit()")
    assert told(found) == [(name, number) for number in (11, 12) for name in ("batch", "batch", "step")]


def test_a_trainer_created_in_the_process_makes_the_steps(python: Python, tmp_path: Path) -> None:
    found = spans(python, tmp_path, COUNTED, "import above; above.Trainer().fit()", above=MADE)
    assert told(found) == [("batch", None)] * 4


def test_a_trainer_that_comes_later_makes_its_own(python: Python, tmp_path: Path) -> None:
    code = "import above, engine\nengine.loop()\nabove.Trainer().fit()\nengine.loop()"
    steps = [number for name, number in told(spans(python, tmp_path, COUNTED, code)) if name == "step"]
    assert steps == [1, 2, 11, 12]
