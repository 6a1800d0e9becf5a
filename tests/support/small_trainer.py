"""Trainers that run in child processes: one that computes with torch, and one that starts quickly."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import wrapt

from autoprof.rundir import runs
from autoprof.rundir.runs import Run
from tests.support import helpers, packages
from tests.support.helpers import TORCH, Python
from tests.support.recipe_texts import Hook, recipe

TRAINER = (
    TORCH
    + """
import os, signal, sys, threading, time

class Trainer:
    global_step = 0
    def fit(self, inside=lambda: None, steps=3):
        for self.global_step in range(1, steps + 1):
            self.step(inside)
    def step(self, inside):
        self.update(inside)
    def update(self, inside):
        torch.ones(30, 30) @ torch.ones(30, 30)
        if self.global_step == 2:
            inside()
        torch.ones(30, 30) + 1
"""
)
# Trainer that starts quickly, for tests of processes. It writes a timeline and no traces.
PLAIN = """
import os, signal, sys, threading, time

class Trainer:
    global_step, dies_in = 0, 2
    def fit(self, inside=lambda: None, steps=3):
        for self.global_step in range(1, steps + 1):
            self.step(inside)
    def step(self, inside=lambda: None):
        self.update(inside)
    def update(self, inside):
        if self.global_step == self.dies_in:
            inside()
"""
STEP = ("step", "Trainer.step", "step.wrap", 'number = "self.global_step"')
UPDATE = ("update", "Trainer.update", "stage", 'stage = "update_actor", role = "actor"')
HOOKS = (STEP, UPDATE)
BEGIN = "from small import *\n"


def write(folder: Path, trainer: str = TRAINER, hooks: Sequence[Hook] = HOOKS) -> Path:
    """Write a trainer and its recipe into a folder `lib` of `folder`, and return its path."""
    if trainer != PLAIN:
        packages.need("torch")
    lib = folder / "lib"
    lib.mkdir(exist_ok=True)
    (lib / "small.py").write_text(trainer)
    (lib / "small.toml").write_text(recipe("small", *hooks))
    return lib


def plain(
    folder: Path, code: str, *command: str, hooks: Sequence[Hook] = HOOKS, check: bool = False, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a script `train.py` that can import the trainer that starts quickly.

    autoprof is on and captures nothing. `command` precedes the script.
    """
    lib = write(folder, PLAIN, hooks)
    (folder / "train.py").write_text(code)
    settings = {"AUTOPROF": "1", "AUTOPROF_STEPS": "", "AUTOPROF_RECIPES": str(lib / "small.toml")}
    settings |= {"PYTHONPATH": str(lib)} | variables
    return helpers.run([sys.executable, *command, "train.py"], cwd=folder, check=check, **settings)


def prepare(folder: Path, python: Python) -> Python:
    """Write the trainer into `folder`, and return a function that runs code there.

    The code follows `from small import *`. autoprof is on and captures step 2.
    """
    lib = write(folder)

    def go(code: str, *, check: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
        settings = {"AUTOPROF": "1", "AUTOPROF_STEPS": "2", "AUTOPROF_RECIPES": str(lib / "small.toml")}
        path = {"PYTHONPATH": str(lib), "OMP_NUM_THREADS": "1"}
        return python(BEGIN + code, check=check, **settings | path | variables)

    return go


def torchrun(folder: Path, script: str, *options: str, trainer: str = TRAINER, **variables: str) -> Run:
    """Run a script in two ranks of torchrun, assert that both succeed, and return the run.

    The script can import the small trainer, or the one given as `trainer`. Their stderr is written to a file `stderr`.
    """
    lib = write(folder, trainer)
    (folder / "train.py").write_text(script)
    settings = {"AUTOPROF": "1", "AUTOPROF_RANKS": "all", "AUTOPROF_RECIPES": str(lib / "small.toml")}
    # The launcher imports autoprof's dependencies before `site` has set all paths.
    path = {"PYTHONPATH": f"{lib}:{Path(wrapt.__file__).parent.parent}", "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *options]
    done = helpers.run([*launcher, "train.py"], cwd=folder, **settings | path | variables)
    assert done.returncode == 0, done.stderr[-3000:]
    (folder / "stderr").write_text(done.stderr)
    (run,) = runs.runs(folder / "autoprof_runs")
    assert run.state == "ended"
    return run


def metas(folder: Path) -> list[dict[str, Any]]:
    """Return the meta files of the newest run in `folder`."""
    found = (folder / "autoprof_runs" / "latest").glob("global_step_*/*.meta.json")
    return [json.loads(path.read_text()) for path in sorted(found)]


def warnings(result: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the lines that autoprof wrote to stderr."""
    return [line for line in result.stderr.splitlines() if line.startswith("autoprof: ")]
