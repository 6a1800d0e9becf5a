"""`autoprof recipes --try`: what the hooks of a recipe did in a command, with real processes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from autoprof.base.intervals import Union
from autoprof.cli import recipes_try
from autoprof.run import runtime, try_stacks
from tests.support.helpers import Autoprof

LOOP = """
import os, signal, subprocess, sys

class Trainer:
    step = 0
    def train_step(self, rare):
        self.update(rare)
    def update(self, rare): ...
    def wrong(self): ...
    def unused(self): ...
    def forward(self): ...

def child():
    trainer = Trainer()
    for trainer.step in (7, 8):
        trainer.train_step(False)
    os.kill(os.getpid(), signal.SIGKILL)

def main():
    trainer = Trainer()
    for number in range(1, 5):
        trainer.step = number
        trainer.train_step(number == 3)
        trainer.forward()
    trainer.wrong()
    subprocess.run([sys.executable, "-c", "import tiny.loop; tiny.loop.child()"])
    print("the command's own output")
    raise SystemExit(5)
"""
X = '{ stage = "x", role = "actor" }'
POLISH = '{ stage = "polish", role = "actor", when = { rare = "True" } }'
# Name, module, attribute, behaviour, options, and what else the table has.
HOOKS = [
    ("step", "loop", "Trainer.train_step", "step.wrap", '{ number = "self.step" }', ""),
    ("update", "loop", "Trainer.update", "stage", POLISH, 'kind = "update_actor"'),
    ("never", "loop", "Trainer.unused", "stage", X, ""),
    ("gone", "loop", "Trainer.missing", "stage", X, ""),
    ("elsewhere", "other", "f", "stage", X, ""),
    ("wrong", "loop", "Trainer.wrong", "stage", '{ stage = "x", role = "actor", rank = "self.no_rank" }', ""),
    ("pass", "loop", "Trainer.forward", "stage.pass", "{}", ""),
]
HOOK = """
[[hook]]
name = "{}"
module = "tiny.{}"
attribute = "{}"
behaviour = "{}"
options = {}
{}
"""


@pytest.fixture
def tiny(tmp_path: Path) -> list[str]:
    """The arguments that try a recipe with a command, which has a child that is killed."""
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "__init__.py").touch()
    (tmp_path / "tiny" / "loop.py").write_text(LOOP)
    (tmp_path / "tiny" / "other.py").write_text("def f(): ...\n")
    (tmp_path / "tiny.toml").write_text('target = "tiny"\n' + "".join(HOOK.format(*hook) for hook in HOOKS))
    return ["--try", "tiny.toml", "--", sys.executable, "-c", "import tiny.loop; tiny.loop.main()"]


def test_each_hook_says_what_it_did(autoprof: Autoprof, tiny: list[str], tmp_path: Path) -> None:
    done = autoprof("recipes", "--json", *tiny)
    assert done.returncode == 5, done.stderr
    found = json.loads(done.stdout)
    assert "the command's own output" in done.stderr
    hooks = {hook["name"]: hook for hook in found["hooks"]}
    states = {name: hook["state"] for name, hook in hooks.items()}
    assert states == {
        "step": "fired",
        "update": "fired",
        "never": "not called",
        "gone": "skipped",
        "elsewhere": "not imported",
        "wrong": "failed",
        "pass": "fired",
    }
    assert (hooks["step"]["calls"], hooks["step"]["steps"]) == (6, [1, 2, 3, 4, 7, 8])
    killed = next(process for process in hooks["step"]["processes"] if process["calls"] == 2)
    assert killed["steps"] == [7, 8]
    assert (hooks["update"]["calls"], hooks["update"]["left_alone"], hooks["update"]["steps"]) == (1, 5, [3])
    assert "missing" in hooks["gone"]["said"]
    assert "tiny.other" in hooks["elsewhere"]["said"]
    assert hooks["pass"]["calls"] == 4
    assert "no_rank" in hooks["wrong"]["said"]
    assert found["status"] == 5
    assert set(found["steps"]) >= {1, 2, 3, 4, 7, 8}
    assert {"role": "actor", "stage": "polish", "kind": "update_actor", "times": 1, "steps": [3]} in found["stages"]
    assert not (tmp_path / "autoprof_runs").exists()


def test_a_table_for_people(autoprof: Autoprof, tiny: list[str]) -> None:
    done = autoprof("recipes", *tiny)
    assert done.returncode == 5, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "the command's own output"
    rows = {line.split()[0]: line.split() for line in lines[2:] if line}
    assert rows["step"][1:4] == ["fired", "6", "1-4,7,8"]
    assert rows["never"][1:4] == ["not", "called", "0"]
    assert "no process imported tiny.other" in done.stdout
    assert "1 call" not in rows["update"]
    assert "no_rank" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--try", "tiny.toml"], 2, "no command was given"),
        (["--try", "nothing.toml", "--", "true"], 1, "nothing.toml: there is no such file, and there is no recipe"),
        (["--try", "broken.toml", "--", "true"], 1, "behaviour: there is no 'stge'; did you mean 'stage'?"),
        (["--try", "tiny.toml", "--", "no-such-command"], 127, "no-such-command: it is not found on the PATH"),
        (["verl", "more"], 2, "unexpected argument 'more'"),
    ],
)
def test_wrong_use(
    arguments: list[str], status: int, said: str, autoprof: Autoprof, tiny: list[str], tmp_path: Path
) -> None:
    (tmp_path / "broken.toml").write_text(
        'target = "broken"\n[[hook]]\nname = "a"\nattribute = "f"\nbehaviour = "stge"\n'
    )
    done = autoprof("recipes", *arguments)
    assert (done.returncode, done.stdout) == (status, "")
    assert said in done.stderr


def test_a_recipe_is_known_by_its_name_too(autoprof: Autoprof, tiny: Any) -> None:
    done = autoprof("recipes", "--try", "codetiming", "--json", "--", sys.executable, "-c", "print(1)")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {hook["state"] for hook in found["hooks"]} == {"not imported"}


SAMPLES = """
import time

class Trainer:
    def sample(self, index): return [1] * index, "text"
    def generate(self):
        for index in range(4): self.sample(index)
    def mysterious(self, seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end: time.sleep(0.01)
    def train_step(self):
        began = time.monotonic()
        self.generate()
        self.mysterious(max(0.3, 20 * (time.monotonic() - began)))
    def fit(self):
        for _ in range(3): self.train_step()

Trainer().fit()
"""
READS = '{ kind = "sample", stage = "one", role = "agent", ids = { prompt = "index" }, RESULT }'


def samples_recipe(folder: Path, *, stage: bool) -> list[str]:
    """Write a trainer and its recipe. Return the arguments that try the recipe."""
    (folder / "train.py").write_text(SAMPLES)
    options = READS.replace("RESULT", 'result_counts = { tokens = "0", gone = "nothing" }')
    hooks = [
        HOOK.format("step", "x", "Trainer.train_step", "step.wrap", "{}", ""),
        HOOK.format("sample", "x", "Trainer.sample", "span", options, ""),
        HOOK.format("generate", "x", "Trainer.generate", "stage", X, "") if stage else "",
    ]
    (folder / "train.toml").write_text('target = "train"\n' + "".join(hooks).replace("tiny.x", "train.py"))
    return ["--try", "train.toml", "--", sys.executable, "train.py"]


def test_the_time_without_a_stage_names_its_functions(autoprof: Autoprof, tmp_path: Path) -> None:
    done = autoprof("recipes", "--json", *samples_recipe(tmp_path, stage=True))
    found = json.loads(done.stdout)
    assert found["makes_traces"]
    uncovered = found["uncovered"]
    assert uncovered["seconds"] == pytest.approx(uncovered["steps_s"], rel=0.1)
    assert next(iter(uncovered["functions"])).endswith("mysterious")
    assert "no stage hook" not in done.stderr


def test_a_few_samples_on_the_wrong_side_of_a_stage_change_no_function(tmp_path: Path) -> None:
    inner, outer = ["t:mysterious", "t:train_step", "t:fit"], ["t:train_step", "t:fit"]
    stacks = [inner] * 50 + [outer] + [["zipimport:init"]] + [inner] * 3 + [["t:sample", *outer]]
    moments = [*range(52), 200, 201, 202, 203]
    folder = tmp_path / runtime.CALLS
    folder.mkdir()
    lines = [json.dumps([moment, names]) for moment, names in zip(moments, stacks, strict=True)]
    (folder / f"h-1.x{try_stacks.ENDING}").write_text("\n".join(lines))
    found = recipes_try._functions(tmp_path, "h-1", Union([(0, 100)]))
    assert found == {"t:mysterious": 50, "zipimport:init": 1}


def test_values_that_a_sample_hook_did_not_read_are_shown(autoprof: Autoprof, tmp_path: Path) -> None:
    command = samples_recipe(tmp_path, stage=False)
    found = json.loads(autoprof("recipes", "--json", *command).stdout)
    read = {value["value"]: (value["times"], value["calls"], value["example"]) for value in found["values"]}
    assert read == {
        "ids.prompt": (12, 12, "3"),
        "result_counts.tokens": (12, 12, "3"),
        "result_counts.gone": (0, 12, ""),
    }
    assert not found["makes_traces"]
    done = autoprof("recipes", *command)
    assert "autoprof: no stage hook: this recipe makes no traces\n" in done.stderr
    assert "no stage ran in 100% of the steps' time" in done.stdout
    checked = autoprof("recipes", "--check", "train.toml")
    assert checked.returncode == 0
    assert "train.toml: note: no stage hook: this recipe makes no traces\n" in checked.stdout
