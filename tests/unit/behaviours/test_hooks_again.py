"""Functions and classes that another library replaces after they were hooked, as Unsloth does (`hooks.again`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import helpers
from tests.support.helpers import Python
from tests.support.recipe_texts import recipe

TRAINER = """
class Trainer:
    def train(self):
        for number in (1, 2):
            self.step(number)
    def step(self, number):
        return self.work()
    def work(self):
        return "theirs"
"""
# Recompiles the method from its source, as Unsloth does. inspect shows the source of the function inside a wrapper.
FASTER = """
import functools, inspect, textwrap
import small

def method():
    if small.Trainer.work.__name__ == "fast":
        return
    source = textwrap.dedent(inspect.getsource(small.Trainer.work))
    exec(source.replace("def work", "def fast").replace("theirs", "fast"), globals())
    small.Trainer.work = fast

def whole_class():
    if small.Trainer.__name__ == "FastTrainer":
        return
    source = inspect.getsource(small.Trainer).replace("class Trainer", "class Fast").replace("theirs", "fast")
    exec(source, globals())
    small.Trainer = type("FastTrainer", (Fast,), {})

def around():
    work = small.Trainer.work
    small.Trainer.work = functools.wraps(work)(lambda self: work(self))
"""
RECIPE = recipe(
    "small",
    ("step", "Trainer.step", "step.wrap", 'number = "number"'),
    ("work", "Trainer.work", "stage", 'stage = "work", role = "trainer"'),
)
AGAIN = """
target = "faster"
passive = true
[[hook]]
name = "replaced"
attribute = "NAME"
behaviour = "hooks.again"
options = { targets = ["small"] }
"""
WORK = [("work", 1), ("step", 1), ("work", 2), ("step", 2)]


def told(python: Python, folder: Path, name: str, again: str) -> tuple[str, list[tuple[str, int | None]]]:
    """Return a trainer's result after its class was changed, and the run's spans in order of their ends."""
    (folder / "small.py").write_text(TRAINER)
    (folder / "faster.py").write_text(FASTER)
    (folder / "small.toml").write_text(RECIPE)
    (folder / "faster.toml").write_text(again.replace("NAME", name))
    use = "small.Trainer().train(); print(small.Trainer().work())"
    code = f"import small, faster; faster.{name}(); faster.{name}(); {use}"
    ran = python(code, AUTOPROF="1", AUTOPROF_STEPS="", AUTOPROF_RECIPES="small.toml:faster.toml")
    timelines = (folder / "autoprof_runs").glob("2*/journal/*.jsonl")
    spans = [(span["name"], span["step"]) for timeline in timelines for span in helpers.spans(timeline)]
    return ran.stdout.strip(), [span for span in spans if span[1] is not None]


@pytest.mark.parametrize(("name", "returned"), [("method", "fast"), ("whole_class", "fast"), ("around", "theirs")])
def test_what_was_replaced_is_hooked_again_and_once(python: Python, tmp_path: Path, name: str, returned: str) -> None:
    assert told(python, tmp_path, name, AGAIN) == (returned, WORK)


def test_without_it_the_hooks_are_gone(python: Python, tmp_path: Path) -> None:
    other = AGAIN.replace('["small"]', '["other"]')
    assert told(python, tmp_path, "whole_class", other) == ("fast", [])
