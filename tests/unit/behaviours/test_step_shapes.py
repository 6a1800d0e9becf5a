"""The shapes in which a recipe finds a step, on a trainer without anything else, as docs/reference/recipes.md says."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.support import helpers
from tests.support.helpers import Python, processes_of

TRAINER = """
class State:
    finished = 0

class Trainer:
    def __init__(self):
        self.state = State()
    def fit(self):
        self.resume(10)
        for number in (11, 12, 13):
            self.step(number)
    def step(self, number):
        self.begin(number)
        self.work()
        self.state.finished = number
        self.end()
        self.log(number)
    def resume(self, number): ...
    def begin(self, number): ...
    def work(self): ...
    def end(self): ...
    def log(self, finished): ...
"""
HOOK = '[[hook]]\nname = "{}"\nmodule = "small"\nattribute = "Trainer.{}"\nbehaviour = "{}"\noptions = {{ {} }}\n'
WORK = HOOK.format("work", "work", "span", 'stage = "work", role = "trainer"')


def spans(python: Python, folder: Path, *hooks: tuple[str, str, str]) -> list[tuple[str, int | None]]:
    """Run the trainer with a recipe. Return name and step of its spans, in order of their ends."""
    (folder / "small.py").write_text(TRAINER)
    recipe = 'target = "small"\n' + WORK + "".join(HOOK.format(f"h{hook[0]}", *hook) for hook in hooks)
    (folder / "small.toml").write_text(recipe)
    python("import small; small.Trainer().fit()", AUTOPROF="1", AUTOPROF_STEPS="", AUTOPROF_RECIPES="small.toml")
    (timeline,) = (folder / "autoprof_runs").glob("2*/journal/*.jsonl")
    return [(span["name"], span["step"]) for span in helpers.spans(timeline)]


FOREIGN = """
import functools
from small import Trainer
step = Trainer.step
Trainer.step = functools.wraps(step)(lambda self, number: step(self, number))
"""


def later(table: str) -> str:
    """The hook of a module that has the class, too, and is imported later."""
    return table.replace('module = "small"', 'module = "small.later"')


def package(
    python: Python, folder: Path, imports: str, *tables: str, more: str = "", runs: str = "Trainer"
) -> list[tuple[str, int | None]]:
    """Run the trainer of a package with these hooks. Return the spans of its timeline in order of their ends."""
    (folder / "small").mkdir()
    (folder / "small" / "__init__.py").write_text(TRAINER + more)
    (folder / "small" / "foreign.py").write_text(FOREIGN)
    (folder / "small" / "later.py").write_text("from small import Trainer\n")
    (folder / "small.toml").write_text('target = "small"\n' + "".join(tables))
    python(f"{imports}\nsmall.{runs}().fit()", AUTOPROF="1", AUTOPROF_STEPS="", AUTOPROF_RECIPES="small.toml")
    (timeline,) = (folder / "autoprof_runs").glob("2*/journal/*.jsonl")
    return [(span["name"], span["step"]) for span in helpers.spans(timeline) if span["kind"] != "profiling"]


@pytest.mark.parametrize(
    ("hooks", "numbers"),
    [
        ([("step", "step.wrap", 'number = "number"')], [11, 12, 13]),
        ([("step", "step.wrap", 'number = "self.state.finished", offset = 1')], [1, 12, 13]),
        ([("step", "step.wrap", "")], [1, 2, 3]),
        ([("begin", "step.begin", 'number = "number"'), ("end", "step.end", "")], [11, 12, 13]),
        ([("begin", "step.begin", ""), ("end", "step.end", "")], [1, 2, 3]),
        ([("step", "step.begin", 'number = "number"'), ("begin", "step.begin", 'number = "number"'),
          ("end", "step.end", "")], [11, 12, 13]),
    ],
)  # fmt: skip
def test_steps_that_end(python: Python, tmp_path: Path, hooks: list[tuple[str, str, str]], numbers: list[int]) -> None:
    assert spans(python, tmp_path, *hooks) == [(name, number) for number in numbers for name in ("work", "step")]


FROM_12 = [("work", 12), ("step", 12), ("work", 13), ("step", 13)]


@pytest.mark.parametrize(
    ("method", "options", "found"),
    [
        ("begin", 'number = "number"', [("work", 11), ("step", 11), ("work", 12), ("step", 12), ("work", 13)]),
        ("end", 'number = "self.state.finished", offset = 1', [("work", None), *FROM_12]),
        ("end", 'number = "self.state.finished", offset = 1, at = "end"', [("work", 1), ("step", 1), *FROM_12]),
        # The stage, which opens the first step, does not know its number.
        ("log", 'number = "finished", offset = 1, at = "end"', [("work", 1), ("step", 1), *FROM_12]),
    ],
)
def test_a_tick(python: Python, tmp_path: Path, method: str, options: str, found: list[tuple[str, int | None]]) -> None:
    assert spans(python, tmp_path, (method, "step.tick", options)) == found


# Both orders of a tick and a stage on one function.
@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(
    ("at", "found"),
    [
        ("begin", [("log", 1), ("step", 1), ("log", 2), ("step", 2), ("log", 3)]),
        ("end", [("log", 1), ("step", 1), ("log", 2), ("step", 2), ("log", 3), ("step", 3)]),
    ],
)
def test_a_stage_on_the_function_of_a_tick_belongs_to_its_step(
    python: Python, tmp_path: Path, order: int, at: str, found: list[tuple[str, int]]
) -> None:
    tables = [
        HOOK.format("tick", "log", "step.tick", f'at = "{at}"'),
        HOOK.format("log", "log", "stage", 'stage = "log", role = "trainer"'),
    ]
    assert package(python, tmp_path, "import small", *tables[::order]) == found


@pytest.mark.parametrize("runs", ["Trainer", "Twice"])
def test_a_tick_at_the_end_makes_no_step_after_the_last(python: Python, tmp_path: Path, runs: str) -> None:
    tables = [
        HOOK.format("tick", "log", "step.tick", 'at = "end"'),
        HOOK.format("fit", "fit", "step.loop", ""),
        WORK,
    ]
    twice = "class Twice:\n    def fit(self):\n        Trainer().fit()\n        Trainer().fit()\n"
    found = package(python, tmp_path, "import small", *tables, more=twice, runs=runs)
    assert found == [(name, number) for number in (1, 2, 3) for name in ("work", "step")] * (
        1 if runs == "Trainer" else 2
    )


FINISHED = ("end", "step.finished", 'number = "self.state.finished"')


def test_a_call_at_the_end_of_a_step_gives_the_next_number(python: Python, tmp_path: Path) -> None:
    found = spans(python, tmp_path, ("begin", "step.begin", ""), FINISHED)
    assert [number for name, number in found if name == "step"] == [1, 12]
    assert [number for name, number in found if name == "work"] == [1, 12, 13]


# A step that begins twice is one until it is finished.
@pytest.mark.parametrize("begins", [["begin"], ["begin", "step"]])
def test_a_resumed_run_continues_after_the_reported_step(python: Python, tmp_path: Path, begins: list[str]) -> None:
    told = ("resume", "step.finished", 'number = "number"')
    hooks = [(name, "step.begin", "") for name in begins]
    found = spans(python, tmp_path, *hooks, ("fit", "step.loop", ""), told, FINISHED)
    assert [number for name, number in found if name == "step"] == [11, 12, 13]


# Each order of a step, its loop and a stage in one recipe or in several.
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.fault("hooks of a step and a stage on one method", "goes on", "nothing; the step goes around the stage")
def test_a_step_goes_around_what_else_is_hooked_on_its_method(
    python: Python, tmp_path: Path, order: tuple[int, ...], apart: bool
) -> None:
    kinds = [("step.wrap", 'number = "number"'), ("step.end", ""), ("stage", 'stage = "update", role = "actor"')]
    tables = [HOOK.format(f"h{place}", "step", *kinds[place]) for place in order]
    if apart:  # another module has the class, too, and is imported later
        tables[1:] = [later(table) for table in tables[1:]]
    assert package(python, tmp_path, "import small.later", *tables) == [
        (name, number) for number in (11, 12, 13) for name in ("update", "step")
    ]


@pytest.mark.parametrize("order", [("Trainer", "Child"), ("Child", "Trainer")])
@pytest.mark.parametrize("first", ["stage", "step.begin"])
def test_a_step_goes_around_a_stage_of_a_class_that_inherits_the_method(
    python: Python, tmp_path: Path, order: tuple[str, str], first: str
) -> None:
    kinds = {"step.begin": 'number = "number"', "stage": 'stage = "update", role = "actor"'}
    second = next(kind for kind in kinds if kind != first)
    tables = [
        HOOK.replace("Trainer", owner).format(kind[:5].replace(".", ""), "step", kind, kinds[kind])
        for owner, kind in zip(order, (first, second), strict=True)
    ]
    child = "class Child(Trainer): ...\n"
    assert package(python, tmp_path, "import small", *tables, more=child, runs="Child") == [
        ("update", 11), ("step", 11), ("update", 12), ("step", 12), ("update", 13),
    ]  # fmt: skip


def test_a_stage_that_a_foreign_wrapper_keeps_from_its_step_is_refused(python: Python, tmp_path: Path) -> None:
    step, stage = ("step", "step.wrap", 'number = "number"'), ("step", "stage", 'stage = "update", role = "actor"')
    tables = HOOK.format("step", *step), later(HOOK.format("update", *stage))
    assert package(python, tmp_path, "import small.foreign, small.later", *tables) == [
        ("step", number) for number in (11, 12, 13)
    ]
    (process,) = processes_of(tmp_path / "autoprof_runs" / "latest")
    update = process["hooks"]["small/update"]
    assert update["state"] == "failed"
    assert "it must go inside the hook small/step" in update["reason"]


def test_a_trainer_that_is_started_as_a_module(python: Python, tmp_path: Path) -> None:
    package = tmp_path / "small"
    package.mkdir()
    (package / "__init__.py").write_text("def set_up(): ...\n")
    main = 'if __name__ == "__main__":\n    from small import set_up\n    set_up()\n    Trainer().fit()\n'
    (package / "trainer.py").write_text(TRAINER + main)
    hooks = [
        ("small", "set_up", "main", ""),
        ("small.trainer", "Trainer.step", "step.wrap", 'number = "number"'),
        ("small.trainer", "Trainer.work", "span", 'stage = "work", role = "trainer"'),
    ]
    tables = [
        HOOK.replace('"small"', f'"{module}"')
        .replace("Trainer.{}", "{}")
        .format(f"h{place}", attribute, behaviour, options)
        for place, (module, attribute, behaviour, options) in enumerate(hooks)
    ]
    (tmp_path / "small.toml").write_text('target = "small"\n' + "".join(tables))
    python(["-m", "small.trainer"], AUTOPROF="1", AUTOPROF_STEPS="", AUTOPROF_RECIPES="small.toml")
    (timeline,) = (tmp_path / "autoprof_runs").glob("2*/journal/*.jsonl")
    found = helpers.spans(timeline)
    expected = [(name, number) for number in (11, 12, 13) for name in ("work", "step")]
    assert [(span["name"], span["step"]) for span in found] == expected
