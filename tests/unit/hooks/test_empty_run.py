"""Runs without an applied hook, seen from outside: one line at the end gives the cause and the remedy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from autoprof._boot import Command
from autoprof.cli import main
from autoprof.hooks import empty_run
from autoprof.run.runtime import Runtime
from autoprof.rundir.records import RunNode
from tests.support.helpers import Python, processes_of

Said = Callable[..., "list[str]"]
HOOK = 'name = "step", attribute = "Trainer.step", behaviour = "step.wrap", options = { number = "value" }'
TRAINER = "class Trainer:\n    def step(self, value): return value\n"
STEP = "import tiny; tiny.Trainer().step(1)"
# Starts the next word of its command line in another folder, as a user's launcher does.
PARENT = """
import os, subprocess, sys
script = os.path.abspath(sys.argv[1])
os.chdir("/")
subprocess.run([sys.executable, script])
"""
BEGIN = "autoprof: no hook was applied in this run, so there is no profile: "


@pytest.fixture
def said(tmp_path: Path, python: Python) -> Said:
    """Return autoprof's lines on stderr from a run of `train.py`, or of this command."""

    def run(code: str = STEP, *command: str, hook: str = HOOK, name: str = "tiny", **variables: str) -> list[str]:
        lib = tmp_path / "lib"
        (lib / "tiny-3.0.dist-info").mkdir(parents=True)
        (lib / "tiny-3.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny\nVersion: 3.0\n")
        (lib / "tiny.py").write_text(TRAINER)
        (tmp_path / f"{name}.toml").write_text(f'target = "tiny"\nhook = [{{ {hook} }}]\n')
        (tmp_path / "train.py").write_text(code)
        (tmp_path / "parent.py").write_text(PARENT)
        (tmp_path / "torchrun").write_text(PARENT)
        known = {"AUTOPROF": "1", "AUTOPROF_STEPS": "", "AUTOPROF_RECIPES": f"{name}.toml", "PYTHONPATH": str(lib)}
        result = python([*command, "train.py"], check=False, **known | variables)
        return [line for line in result.stderr.splitlines() if line.startswith("autoprof")]

    return run


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"code": "import json"}, ["train.py did not import tiny", "tiny.toml is for tiny"]),
        ({"code": "import nothing_there"}, ["ModuleNotFoundError ended the process early"]),
        (
            {"code": TRAINER},
            ["Trainer is defined in train.py, which runs as __main__", 'module = "train.py", in a file train.toml'],
        ),
        ({"name": "tinny"}, ["tinny.toml: target: it is 'tiny'", "name the file tiny.toml"]),
        ({"hook": HOOK.replace("Trainer.step", "Trainer.gone")}, ["Trainer has no gone", "autoprof recipes --check"]),
        (
            {"AUTOPROF_DISABLE": "tiny"},
            ["AUTOPROF_DISABLE=tiny leaves out every hook of tiny; ", " recipes tiny lists"],
        ),
        ({"AUTOPROF_DISABLE": "x,tiny/st*"}, ["AUTOPROF_DISABLE=x,tiny/st* leaves out every hook of tiny; "]),
    ],
)
def test_the_line_gives_the_cause(said: Said, options: dict[str, str], cause: list[str], tmp_path: Path) -> None:
    (line,) = said(**options)
    assert line.startswith(BEGIN)
    assert [text for text in cause if text not in line] == []


@pytest.mark.parametrize("command", [[], ["parent.py"], ["torchrun"]])
@pytest.mark.parametrize("code", [STEP, f"import autoprof\nwith autoprof.step(1): {STEP}"])
def test_a_wrong_recipe_is_reported_once(said: Said, code: str, command: list[str]) -> None:
    (line,) = said(code, *command, hook=HOOK.replace("step.wrap", "step.wrp"))
    assert "tiny.toml: [[hook]] 'step' behaviour: there is no 'step.wrp'" in line


def test_a_program_without_a_recipe_gets_the_command_that_writes_one(
    said: Said, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (line,) = said("import json", AUTOPROF_RECIPES="")
    assert line == "autoprof: no recipe for train.py; write one: autoprof recipes --new -- python train.py"
    runs = str(tmp_path / "autoprof_runs")
    for command, status in (("doctor", 1), ("report", 0)):
        assert main.main([command, "latest", "--dir", runs]) == status
        assert f"no hook was applied: {line.removeprefix('autoprof: ')}" in " ".join(capsys.readouterr().out.split())


def test_a_program_without_a_recipe_keeps_the_latest_run(said: Said, tmp_path: Path) -> None:
    runs = tmp_path / "autoprof_runs"
    (runs / "earlier").mkdir(parents=True)
    (runs / "earlier" / "run.json").write_text("{}")
    (runs / "latest").symlink_to("earlier")
    said("import json", AUTOPROF_RECIPES="")
    assert (runs / "latest").readlink() == Path("earlier")
    assert len(list(runs.glob("*/run.json"))) == 3  # with the link's


@pytest.mark.parametrize("folder", ["/dev/null", "lib/tiny.py/runs", "~nobody-here/runs"])
def test_a_program_without_a_recipe_needs_no_folder(said: Said, folder: str) -> None:
    (line,) = said("import json", AUTOPROF_RECIPES="", AUTOPROF_DIR=folder)
    assert line == "autoprof: no recipe for train.py; write one: autoprof recipes --new -- python train.py"


def test_a_program_without_a_recipe_may_change_its_command_line(said: Said) -> None:
    (line,) = said("import sys; sys.orig_argv.clear(); del sys.argv", AUTOPROF_RECIPES="")
    assert line == "autoprof: no recipe for train.py; write one: autoprof recipes --new -- python"


def test_a_program_with_hooks_may_change_its_command_line(said: Said) -> None:
    assert said(f"import sys; sys.orig_argv.clear(); del sys.argv; {STEP}") == []


def test_a_hook_that_fails_is_named_and_not_one_that_the_user_leaves_out(said: Said) -> None:
    gone = HOOK.replace('"step"', '"begin"').replace("Trainer.step", "Trainer.gone")
    (line,) = said(hook=f"{HOOK} }}, {{ {gone}", AUTOPROF_DISABLE="tiny/step")
    assert "tiny 3.0 was imported, but no hook fits it: Trainer has no gone; autoprof recipes --check" in line


def test_a_module_that_is_not_imported_is_named_and_no_hook_that_the_user_leaves_out(said: Said) -> None:
    other = HOOK.replace('"step"', '"begin"') + ', module = "tiny.other"'
    (line,) = said(hook=f"{HOOK} }}, {{ {other}", AUTOPROF_DISABLE="tiny/step")
    assert "tiny 3.0 was imported, but none of the modules that have its hooks: tiny.other; " in line


def test_hooks_of_the_users_recipe_that_fit_nowhere_are_named(said: Said, tmp_path: Path) -> None:
    gone = HOOK.replace('"step"', '"begin"').replace("Trainer.step", "Trainer.gone")
    later = HOOK.replace('"step"', '"other"').replace("{ number", '{ resumed = "value", number')
    (line,) = said(hook=f'{HOOK} }}, {{ {gone} }}, {{ {later}, versions = ">99"')
    check = f"autoprof recipes --check {tmp_path / 'tiny.toml'} says what does not fit"
    assert (
        line
        == f"autoprof: {tmp_path / 'tiny.toml'}: these hooks were not applied: begin (Trainer has no gone); {check}"
    )


def test_a_folder_without_recipes_is_named(said: Said, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (line,) = said("import json", AUTOPROF_RECIPES="mine")
    assert line.startswith(f"{BEGIN}AUTOPROF_RECIPES: {tmp_path / 'mine'} is not a recipe; use *.toml files")


@pytest.mark.parametrize("command", [[], ["parent.py"], ["torchrun"]])
def test_ls_and_doctor_say_the_same(
    said: Said, command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (line,) = said(STEP, *command, hook=f'{HOOK}, versions = "<2"')
    assert "tiny 3.0 was imported, but no hook fits it: tiny is 3.0, the hook is for <2; autoprof recipes" in line
    runs = str(tmp_path / "autoprof_runs")
    assert main.main(["ls", "--dir", runs]) == 0
    assert line.removeprefix(BEGIN) in capsys.readouterr().err
    assert main.main(["doctor", "latest", "--dir", runs]) == 1
    assert line.removeprefix(BEGIN) in capsys.readouterr().out


def test_a_missing_recipe_is_reported_before_the_program_runs(said: Said) -> None:
    (line,) = said("import sys; sys.stderr.write('the program runs\\n'); import tiny", AUTOPROF_RECIPES="gone.toml")
    assert "there is no " in line
    assert line.endswith("gone.toml); it takes existing recipe files or folders; autoprof is off for this run")


@pytest.mark.parametrize(
    ("code", "command"),
    [
        (STEP, []),
        (STEP, ["parent.py"]),
        (STEP, ["torchrun"]),
        ("import json", ["-c", "import json"]),
        ("import json; assert 'tiny' not in __import__('sys').modules", ["-m", "json.tool", "--help"]),
    ],
)
def test_no_false_alarm(said: Said, code: str, command: list[str]) -> None:
    assert said(code, *command) == []


@pytest.mark.parametrize(
    ("command", "program"),
    [
        ("python train.py --help", False),
        ("python -u train.py", True),
        ("python -m verl.trainer.main_ppo", True),
        ("python -m http.server", False),
        ("python -c code", False),
        ("python -", False),
        ("python", False),
    ],
)
def test_a_program_may_be_meant_to_be_profiled(command: str, program: bool) -> None:
    assert Command(command.split()).program is program


def test_a_forked_child_prints_nothing(said: Said) -> None:
    assert len(said("import os\nif os.fork(): os.wait()")) == 1


def test_a_driver_with_workers_on_other_nodes_prints_nothing(
    joined: Callable[..., Runtime], caplog: pytest.LogCaptureFixture
) -> None:
    run = joined()
    run.nodes = [RunNode(id="other", host="h", directory="/")]
    empty_run.report()
    assert not caplog.records
    run.nodes = []
    empty_run.report()
    assert "no recipe for " in caplog.text


def test_the_settings_file_names_recipes_of_an_unknown_target(said: Said, tmp_path: Path) -> None:
    (tmp_path / "autoprof.toml").write_text('recipes = "tiny.toml"')
    assert said(STEP, "parent.py", AUTOPROF_RECIPES="") == []
    (process,) = processes_of(tmp_path / "autoprof_runs" / "latest")
    assert process["hooks"]["tiny/step"]["called"]


@pytest.mark.parametrize("code", [STEP, "import json"])
def test_an_unknown_variable_is_reported_once_with_the_nearest(said: Said, code: str) -> None:
    line, *more = said(code, "parent.py", AUTOPROF_STEP="2")
    assert len(more) == (code != STEP)  # the line that no hook was applied
    assert line == "autoprof: AUTOPROF_STEP is ignored: there is no such setting; did you mean 'AUTOPROF_STEPS'?"


def test_a_wrong_setting_is_reported_without_a_target_too(said: Said) -> None:
    (line,) = said("import json", AUTOPROF_RANKS="x")
    assert line.startswith("autoprof: AUTOPROF_RANKS: got 'x'")
