"""Hooks on made-up targets, in real interpreters, from activation to the files on disk."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.helpers import Python, processes_of, spans

TRAINER = """
import functools
class Trainer:
    def __init__(self): self.global_steps = 0
    def step(self, value): return value * 2
    @staticmethod
    def still(value): return value
    @classmethod
    def made(cls, value): return (cls.__name__, value)
    async def later(self, value): return value
class Child(Trainer): pass
def stamp(function):
    @functools.wraps(function)
    def stamped(*args): return ("stamped", function(*args))
    return stamped
@stamp
def decorated(value): return value
def generator(): yield 1
"""


def hook(name: str, attribute: str, more: str = "", module: str = "target.trainer") -> str:
    text = more or f'behaviour = "span"\noptions = {{ stage = "{name}", role = "trainer" }}'
    return f'[[hook]]\nname = "{name}"\nmodule = "{module}"\nattribute = "{attribute}"\n{text}\n'


@pytest.fixture
def run(tmp_path: Path, python: Python) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run code that may import `target.trainer`, with a recipe of these hooks."""
    package = tmp_path / "lib" / "target"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "trainer.py").write_text(TRAINER)

    def go(hooks: str, code: str, head: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "target.toml").write_text(f'target = "target"\n{head}\n{hooks}')
        settings = {"AUTOPROF": "1", "AUTOPROF_RECIPES": str(tmp_path / "target.toml")} | variables
        return python(code, PYTHONPATH=str(tmp_path / "lib"), **settings)

    return go


def left(tmp_path: Path) -> tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]:
    """Return `run.json`, the hooks of the only process, and its timeline."""
    run_dir = tmp_path / "autoprof_runs" / "latest"
    (process,) = processes_of(run_dir)
    return json.loads((run_dir / "run.json").read_text()), process, spans(run_dir)


def test_functions_methods_and_decorated_ones(run: Any, tmp_path: Path) -> None:
    hooks = (
        hook("step", "Trainer.step")
        + hook("still", "Trainer.still")
        + hook("made", "Trainer.made")
        + hook("later", "Trainer.later")
        + hook("inherited", "Child.step")
        + hook(
            "decorated",
            "decorated",
            'behaviour = "span"\nrewrap = "target.trainer.stamp"\noptions = { stage = "decorated", role = "trainer" }',
        )
    )
    code = """
import asyncio
from target import trainer
T = trainer.Trainer
t = T()
print(t.step(2), t.still(3), T.made(4), asyncio.run(t.later(5)), trainer.decorated(6), trainer.Child().step(7))
"""
    assert run(hooks, code).stdout.strip() == "4 3 ('Trainer', 4) 5 ('stamped', 6) 14"
    info, process, spans = left(tmp_path)
    assert {entry["state"] for key, entry in process["hooks"].items() if key.startswith("target/")} == {"applied"}
    assert [span["name"] for span in spans] == ["step", "still", "made", "later", "decorated", "step", "inherited"]
    assert process["errors"] == {}
    assert info["state"] == "ended"
    assert info["recipes"] == ["target"]
    assert info["hosts"] == [process["host"]]


def test_outcomes_have_reasons(run: Any, tmp_path: Path) -> None:
    hooks = (
        hook("good", "Trainer.step")
        + hook("gone", "Trainer.missing")
        + hook("no-class", "Nobody.step")
        + hook("generator", "generator")
        + hook("unimported", "x", module="target.other")
        + hook("disabled", "Trainer.still")
        + hook(
            "other-version",
            "Trainer.made",
            'behaviour = "span"\nversions = ">=99"\noptions = { stage = "x", role = "y" }',
        )
    )
    run(hooks, "import target.trainer", 'distributions = ["pluggy"]', AUTOPROF_DISABLE="target/disabled")
    _, process, _ = left(tmp_path)
    outcome = {
        key.removeprefix("target/"): (entry["state"], entry["reason"]) for key, entry in process["hooks"].items()
    }
    assert outcome["good"][0] == "applied"
    assert outcome["gone"] == ("skipped", "Trainer has no missing")
    assert outcome["no-class"] == ("skipped", "target.trainer has no Nobody")
    assert outcome["generator"] == ("failed", 'TypeError: it is a generator function; set around = "next"')
    assert outcome["unimported"] == ("skipped", "the module was not imported here")
    assert outcome["disabled"] == ("skipped", "AUTOPROF_DISABLE names it")
    assert outcome["other-version"][0] == "skipped"
    assert "the hook is for >=99" in outcome["other-version"][1]


def test_files_of_one_target_share_their_hooks_names(run: Any, tmp_path: Path) -> None:
    head = 'target = "target"\n'
    (tmp_path / "target.more.toml").write_text(head + hook("step", "Trainer.still") + hook("later", "Trainer.later"))
    (tmp_path / "target.left_out.toml").write_text(head + hook("made", "Trainer.made"))
    files = ",".join(str(tmp_path / f"target{part}.toml") for part in ("", ".more", ".left_out"))
    disabled = "target.left*,target/lat*"
    run(
        hook("step", "Trainer.step") + hook("inherited", "Child.step"),
        "import target.trainer",
        AUTOPROF_RECIPES=files,
        AUTOPROF_DISABLE=disabled,
    )
    _, process, _ = left(tmp_path)
    found = {key: (entry["attribute"], entry["state"]) for key, entry in process["hooks"].items()}
    assert found == {
        "target/step": ("Trainer.still", "applied"),
        "target/inherited": ("Child.step", "applied"),
        "target/later": ("Trainer.later", "skipped"),
        "target/made": ("Trainer.made", "skipped"),
    }


def test_a_target_that_is_only_imported_leaves_nothing(run: Any, tmp_path: Path) -> None:
    run(hook("step", "Trainer.step"), "import target")
    assert not (tmp_path / "autoprof_runs").exists()


def test_a_wrong_setting_is_one_line_and_the_run_continues(run: Any, tmp_path: Path) -> None:
    code = "import os; from target import trainer; print(trainer.Trainer().step(2), os.environ['AUTOPROF'])"
    result = run(hook("step", "Trainer.step"), code, AUTOPROF_STEPS="5:2")
    assert result.stdout.strip() == "4 0"
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("autoprof: AUTOPROF_STEPS: got '5:2' (5:2 is an empty range); it takes a step (2)")
    assert not (tmp_path / "autoprof_runs").exists()


def test_a_wrong_recipe_is_one_line_and_the_others_apply(run: Any, tmp_path: Path) -> None:
    bad = tmp_path / "target.bad.toml"
    bad.write_text('target = "target"\n[[hook]]\nname = "x"\n')
    recipes = f"{bad}:{tmp_path / 'target.toml'}"
    code = "from target import trainer; print(trainer.Trainer().step(2))"
    result = run(hook("step", "Trainer.step"), code, AUTOPROF_RECIPES=recipes)
    assert result.stdout.strip() == "4"
    assert result.stderr.count("\n") == 1
    assert f"{bad}: [[hook]] 'x'" in result.stderr
    _, process, spans = left(tmp_path)
    assert [span["name"] for span in spans] == ["step"]
    assert process["errors"]["target.bad.toml"]["count"] == 1


def test_recipes_of_the_settings_file_are_known_once_a_target_is_imported(run: Any, tmp_path: Path) -> None:
    (tmp_path / "autoprof.toml").write_text('recipes = ["more"]')
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "other.toml").write_text(
        'target = "other"\n' + hook("work", "work", module="other").replace('role = "trainer"', 'role = "x"')
    )
    (tmp_path / "lib" / "other.py").write_text("def work(): return 1")
    code = "import ray; import other; print(other.work())"
    result = run("hook = []", code, AUTOPROF_RECIPES="")
    assert result.stdout.strip() == "1"
    assert [span["name"] for span in left(tmp_path)[2]] == ["work"]


def test_an_error_in_a_behaviour_is_counted_and_printed_once(run: Any, tmp_path: Path) -> None:
    hooks = hook("step", "Trainer.step", 'behaviour = "step.wrap"\noptions = { number = "self.no.such.path" }')
    code = "from target import trainer; t = trainer.Trainer(); print([t.step(n) for n in range(4)])"
    result = run(hooks, code)
    assert result.stdout.strip() == "[0, 2, 4, 6]"
    assert result.stderr.count("\n") == 1
    assert "target/step: LookupError: Trainer has no no (path no.such.path)" in result.stderr
    assert left(tmp_path)[1]["errors"]["target/step"]["count"] == 4


def test_an_unwritable_folder_is_reported_once_and_the_run_continues(run: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code = "from target import trainer; t = trainer.Trainer(); print([t.step(n) for n in range(3)])"
    result = run(hook("step", "Trainer.step"), code, AUTOPROF_DIR=str(tmp_path / "file"))
    assert result.stdout.strip() == "[0, 2, 4]"
    assert "can't write to" in result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.splitlines()) <= 2


def test_a_target_imported_before_activation_is_patched_late(run: Any, tmp_path: Path) -> None:
    code = """
import os
from target import trainer
os.environ["AUTOPROF"] = "1"
import _autoprof_gate
print(trainer.Trainer().step(2))
"""
    run(hook("step", "Trainer.step"), code, AUTOPROF="0")
    assert [span["name"] for span in left(tmp_path)[2]] == ["step"]


def test_the_command_line_is_stored_without_secrets(run: Any, tmp_path: Path) -> None:
    code = "import sys; from target import trainer"
    run(hook("step", "Trainer.step"), code, AUTOPROF_ON_FINISH="true hunter2")
    text = (tmp_path / "autoprof_runs" / "latest" / "run.json").read_text()
    assert "hunter2" not in text
    assert '"on_finish": "(set)"' in text


def test_a_function_is_replaced_where_it_was_imported_by_its_name_before_the_run(
    run: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    code = """
from target.trainer import decorated
import autoprof; autoprof.start('')
decorated(1); autoprof.stop(); decorated(2)
"""
    run(hook("late", "decorated"), code, AUTOPROF="")
    _, _, timeline = left(tmp_path)
    assert [span["name"] for span in timeline] == ["late"]


def test_a_file_with_recipes_of_two_targets(run: Any, tmp_path: Path, python: Python) -> None:
    (tmp_path / "lib").mkdir(exist_ok=True)
    (tmp_path / "lib" / "second.py").write_text("def work(): ...\n")
    hooks = hook("step", "Trainer.step").replace("[[hook]]", "[[recipe.hook]]")
    second = hook("work", "work", module="second").replace("[[hook]]", "[[recipe.hook]]")
    path = tmp_path / "target+second.toml"
    path.write_text(f'[[recipe]]\ntarget = "target"\n{hooks}[[recipe]]\ntarget = "second"\n{second}')
    code = "from target.trainer import Trainer\nTrainer().step(1)\nimport second\nsecond.work()"
    run("", code, AUTOPROF_RECIPES=str(path))
    _, process, found = left(tmp_path)
    assert [span["name"] for span in found] == ["step", "work"]
    assert {key for key, entry in process["hooks"].items() if entry["state"] == "applied"} == {
        "target/step",
        "second/work",
    }
