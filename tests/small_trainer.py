"""A trainer that really computes, in processes of its own, for tests of what ends them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

Python = Callable[..., "subprocess.CompletedProcess[str]"]
Go = Callable[..., "subprocess.CompletedProcess[str]"]

TRAINER = """
import os, signal, sys, threading, time
import torch

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
RECIPE = """
target = "small"
hook = [
    { name = "step", module = "small", attribute = "Trainer.step", behaviour = "step.wrap",
      options = { number = "self.global_step" } },
    { name = "update", module = "small", attribute = "Trainer.update", behaviour = "stage",
      options = { stage = "update_actor", role = "actor" } },
]
"""
BEGIN = "from small import *\n"


def prepare(folder: Path, python: Python) -> Go:
    """Runs code in `folder` that may `from small import *`, with autoprof on and step 2 captured."""
    (folder / "lib").mkdir()
    (folder / "lib" / "small.py").write_text(TRAINER)
    recipe = folder / "lib" / "small.toml"
    recipe.write_text(RECIPE.replace("\n    {", " {").replace(",\n      ", ", "))

    def go(code: str, *, check: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
        settings = {"AUTOPROF": "1", "AUTOPROF_STEPS": "2", "AUTOPROF_RECIPES": str(recipe)}
        path = {"PYTHONPATH": str(folder / "lib"), "OMP_NUM_THREADS": "1"}
        return python(BEGIN + code, check=check, **settings | path | variables)

    return go


def metas(folder: Path) -> list[dict[str, Any]]:
    """The meta files of the newest run in `folder`."""
    found = (folder / "autoprof_runs" / "latest").glob("global_step_*/*.meta.json")
    return [json.loads(path.read_text()) for path in sorted(found)]


def warnings(result: subprocess.CompletedProcess[str]) -> list[str]:
    """What autoprof said on stderr."""
    return [line for line in result.stderr.splitlines() if line.startswith("autoprof: ")]
