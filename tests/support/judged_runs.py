"""Real programs whose runs are checked only through the output of autoprof's commands.

The code names no file of a run directory, so the tests stay valid when the files change.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from autoprof.cli import main
from tests.support import helpers
from tests.support.recipe_texts import recipe

RUN_ID = "judged"
# Spans of a whole step, by name.
WHOLE_STEP = ["evaluate", "generate", "update_actor"]
STAGES = ("generate", "update_actor", "evaluate")
# The trainer calls the function `at` with the name of each point in a step.
TRAINER = """
import os, signal, subprocess, sys

def nothing(place): pass

class Trainer:
    def __init__(self, number=0):
        self.number = number
    def fit(self, steps=1, at=nothing):
        for self.number in range(self.number + 1, self.number + steps + 1):
            self.step(at)
            at("after the step")
    def step(self, at):
        at("in the step")
        self.generate(at)
        at("after generate")
        self.update(at)
        at("after update")
    def generate(self, at):
        at("in generate")
    def update(self, at):
        at("in update")
        self.evaluate(at)
        at("after evaluate")
    def evaluate(self, at):
        at("in evaluate")
    def sample(self, name, inside=lambda: None):
        inside()
"""
RECIPE = recipe(
    "small",
    ("step", "Trainer.step", "step.wrap", 'number = "self.number"'),
    ("generate", "Trainer.generate", "stage", 'stage = "generate", role = "rollout"'),
    ("update", "Trainer.update", "stage", 'stage = "update_actor", role = "actor"'),
    ("evaluate", "Trainer.evaluate", "span", 'stage = "evaluate", role = "trainer"'),
    (
        "sample",
        "Trainer.sample",
        "span",
        'stage = "sample", role = "agent_loop", kind = "sample", ids = { sample = "name" }',
    ),
)


def permitted(*options: str) -> bool:
    """Return True if this process may call `unshare` with these options."""
    command = ["unshare", *options, "true"]
    return shutil.which("unshare") is not None and subprocess.run(command, capture_output=True).returncode == 0


class Ended(NamedTuple):
    """Exit status and output of a program."""

    status: int
    stdout: str
    stderr: str

    @property
    def said(self) -> list[str]:
        """Return the lines that autoprof wrote to stderr."""
        return [line for line in self.stderr.splitlines() if line.startswith("autoprof: ")]


class Place:
    """Folder in which programs run that can import the small trainer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs = folder / "runs"
        self.run = self.runs / RUN_ID
        lib = folder / "lib"
        lib.mkdir(parents=True)
        (lib / "small.py").write_text(TRAINER)
        (lib / "small.toml").write_text(RECIPE)

    def start(self, code: str, *arguments: str, before: tuple[str, ...] = (), **variables: str) -> Any:
        """Start a program with pipes as its standard streams. `before` is a prefix of its command."""
        (self.folder / "program.py").write_text(code)
        known = {"AUTOPROF": "1", "AUTOPROF_STEPS": "", "AUTOPROF_RUN_ID": RUN_ID, "AUTOPROF_DIR": str(self.runs)}
        known |= {"AUTOPROF_RECIPES": str(self.folder / "lib" / "small.toml")}
        known |= {"PYTHONPATH": str(self.folder / "lib")} | variables
        return helpers.started([*before, sys.executable, "program.py", *arguments], cwd=self.folder, **known)

    def ended(self, code: str, *arguments: str, before: tuple[str, ...] = (), **variables: str) -> Ended:
        """Run a program and return its exit status and output."""
        started = self.start(code, *arguments, before=before, **variables)
        stdout, stderr = started.communicate(timeout=300)
        return Ended(started.returncode, stdout, stderr)


def asked(*command: str) -> dict[str, Any]:
    """Return the JSON that a command prints, or an empty object if it prints nothing."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()):
        main.main([*command, "--json"])
    return json.loads(out.getvalue() or "{}")


def problems(run: Path) -> list[str]:
    """Return the problems that `autoprof doctor` reports for a run."""
    return asked("doctor", str(run))["problems"]


def steps(run: Path) -> list[int]:
    """Return the numbers of the ended steps in `autoprof report`, or an empty list if it finds no run."""
    report = asked("report", str(run))
    return sorted({step["number"] for part in report.get("loops") or [report] for step in part.get("steps", [])})


def opened(run: Path) -> list[tuple[str, int]]:
    """Return name and step of each open span in `autoprof report`."""
    return sorted((span["name"], span["step"]) for span in asked("report", str(run))["open"])


class Shown(NamedTuple):
    """Span of a step in `autoprof report`. The `name` of a sample is its id."""

    pid: int
    rank: int | None
    file: str
    name: str


def spans(run: Path, step: int) -> list[Shown]:
    """Return the spans of a step in `autoprof report`, or an empty list if the step is not in it."""
    details = asked("report", str(run), "--step", str(step)).get("details", [])
    lanes = [lane for each in details for lane in each["lanes"]]
    return [
        Shown(
            lane["pid"], lane["rank"], lane["file"], span["ids"]["sample"] if span["kind"] == "sample" else span["name"]
        )
        for lane in lanes
        for span in lane["spans"]
    ]


def names(run: Path, step: int) -> list[str]:
    """Return the sorted names of the spans of a step."""
    return sorted(span.name for span in spans(run, step))
