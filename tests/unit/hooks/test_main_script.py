"""Hooks for scripts that run as `__main__`."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoprof.cli.main import main
from tests.support.helpers import Python, processes_of, spans
from tests.support.recipe_texts import recipe

RECIPE = recipe(
    "train",
    ("step", "train.py:Trainer.step", "step.wrap", 'number = "self.number"'),
    ("learn", "train.py:learn", "stage", 'stage = "learn", role = "actor"'),
    ("absent", "train.py:absent", "span", 'stage = "absent", role = "actor"'),
)
SCRIPT = """
import sys
class Trainer:
    number = 0
    def fit(self):
        for self.number in (1, 2):
            self.step()
    def step(self):
        learn(self.number)
def learn(number): return number
learn(0)
if __name__ == "__main__":
    Trainer().fit()
    assert sys.gettrace() is None
    print("through")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Return a folder with a script (also as a module), its launcher, and its recipe."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "train.py").write_text(SCRIPT)
    (tmp_path / "launch.py").write_text("import runpy; runpy.run_path('train.py', run_name='__main__')")
    (tmp_path / "train.toml").write_text(RECIPE)
    return tmp_path


def states(folder: Path) -> dict[str, tuple[str, str]]:
    """Return the state and the reason of each hook, in the only process of the newest run."""
    (process,) = processes_of(folder / "autoprof_runs" / "latest")
    return {key: (hook["state"], hook["reason"]) for key, hook in process["hooks"].items()}


def only_absent(stderr: str, recipe: Path, module: str) -> bool:
    """Return whether the only line reports that the name of the recipe's last hook does not exist."""
    said = f"these hooks were not applied: absent ({module} has no such name)"
    return stderr == f"autoprof: {recipe}: {said}; autoprof recipes --check {recipe} says what does not fit\n"


@pytest.mark.parametrize("command", [["train.py"], ["-m", "package.train"], ["launch.py"]])
def test_what_a_script_defines_is_wrapped_before_it_is_used(script: Path, python: Python, command: list[str]) -> None:
    done = python(command, AUTOPROF="1", AUTOPROF_STEPS="", AUTOPROF_RECIPES=str(script / "train.toml"))
    assert done.stdout == "through\n"
    assert only_absent(done.stderr, script / "train.toml", "train.py")
    found = [(span["name"], span.get("step")) for span in spans(script / "autoprof_runs" / "latest")]
    assert found == [("learn", None), ("learn", 1), ("step", 1), ("learn", 2), ("step", 2)]
    assert states(script) == {
        "train/step": ("applied", ""),
        "train/learn": ("applied", ""),
        "train/absent": ("skipped", "train.py has no such name"),
    }


@pytest.mark.parametrize("kind", ["package", "namespace", "imported", "main"])
def test_a_module_that_is_started_has_its_names_wrapped(script: Path, python: Python, kind: str) -> None:
    """One of a package; of a folder without `__init__.py`; one that its package imports, too; `python -m package`."""
    module = "package.__main__" if kind == "main" else "package.train"
    recipe = RECIPE.replace('"train.py"', f'"{module}"').replace('target = "train"', 'target = "package"')
    (script / "package.toml").write_text(recipe)
    init = script / "package" / "__init__.py"
    if kind == "namespace":
        init.unlink()
    elif kind == "imported":
        init.write_text("from package import train")
    elif kind == "main":
        (script / "package" / "train.py").rename(script / "package" / "__main__.py")
    started = ["-W", "ignore", "-m", module.removesuffix(".__main__")]
    done = python(started, AUTOPROF="1", AUTOPROF_STEPS="", AUTOPROF_RECIPES=str(script / "package.toml"))
    assert done.stdout == "through\n"
    assert only_absent(done.stderr, script / "package.toml", module)
    found = [(span["name"], span.get("step")) for span in spans(script / "autoprof_runs" / "latest")]
    assert found == [("learn", None), ("learn", 1), ("step", 1), ("learn", 2), ("step", 2)]
    found_states = states(script)
    assert {found_states[f"package/{name}"][0] for name in ("step", "learn")} == {"applied"}
    assert found_states["package/absent"][0] == "skipped"


def test_a_script_with_a_foreign_trace_function_is_not_traced(script: Path, python: Python) -> None:
    (script / "sitecustomize.py").write_text("import sys; sys.settrace(lambda *_: None)")
    (script / "train.py").write_text(SCRIPT.replace("is None", "is not None") + "import autoprof; autoprof.start()")
    recipe = str(script / "train.toml")
    python(["train.py"], AUTOPROF="1", AUTOPROF_STEPS="", AUTOPROF_RECIPES=recipe, PYTHONPATH=str(script))
    assert states(script)["train/learn"] == (
        "skipped",
        "autoprof did not see train.py define it; does a debugger or a coverage tool trace it?",
    )


@pytest.mark.parametrize("function", ["_leave_out_unknown", "_apply_defined"])
def test_an_error_in_autoprof_does_not_reach_the_script(script: Path, python: Python, function: str) -> None:
    raises = "def fail(*_): raise RuntimeError('injected')\n"
    patched = f"from autoprof.hooks import patching\n{raises}patching.{function} = fail\n"
    (script / "sitecustomize.py").write_text(patched)
    recipe = str(script / "train.toml")
    done = python(["train.py"], AUTOPROF="1", AUTOPROF_STEPS="", AUTOPROF_RECIPES=recipe, PYTHONPATH=str(script))
    assert done.stdout == "through\n"
    assert "autoprof: main: RuntimeError: injected" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_script_that_starts_its_run_itself_has_its_names_wrapped(script: Path, python: Python) -> None:
    begin = "learn(0)\nimport autoprof; autoprof.start('', recipes='train.toml')\n"
    late = "def absent(): pass\nabsent()\n"
    (script / "train.py").write_text(SCRIPT.replace("learn(0)\n", begin + late))
    python(["train.py"])
    names = [span["name"] for span in spans(script / "autoprof_runs" / "latest")]
    assert names == ["absent", "learn", "step", "learn", "step"]


def test_a_recipe_for_a_script_is_checked(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(script)
    assert main(["recipes", "--check", "train.toml"]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "train.toml: [[hook]] 'absent' attribute: train.py has no absent",
        "train.toml: 1 wrong, 3 hooks; checked against train",
    ]
    (script / "train.toml").write_text(RECIPE.replace('"train.py"', '"other.py"'))
    assert main(["recipes", "--check", "train.toml"]) == 1
    assert "'other.py' is not in the target 'train'" in capsys.readouterr().out
