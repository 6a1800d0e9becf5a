"""Worker processes outside Ray, which get the step with a trainer's calls."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autoprof.base.process import reset
from autoprof.run import cluster
from autoprof.run.cluster import StepAnnouncement
from tests.support import helpers
from tests.support.helpers import Python
from tests.support.recipe_texts import recipe

# The trainer calls a worker over a pipe, as others do over HTTP: in JSON, with a dictionary `meta`.
LOOP = """
import json, subprocess, sys

class Client:
    def __init__(self):
        command = [sys.executable, "-m", "loop.worker"]
        self.worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    def call(self, name, *, meta=None):
        print(json.dumps([name, meta]), file=self.worker.stdin, flush=True)
        return json.loads(self.worker.stdout.readline())
    def close(self):
        self.worker.stdin.close()
        self.worker.wait()

class Trainer:
    def __init__(self):
        self.client = Client()
    def fit(self):
        self.client.call("load")
        answers = [self.step(number) for number in (5, 6, 7)]
        self.client.call("load")
        self.client.close()
        return answers
    def step(self, number):
        return self.client.call("update", meta=self.meta())
    def meta(self):
        return {"theirs": 1}
"""
WORKER = """
import json, sys
import loop.work

for line in sys.stdin:
    name, meta = json.loads(line)
    loop.work.arrived(meta)
    print(json.dumps(getattr(loop.work, name)(meta)), flush=True)
"""
WORK = """
import os
if os.environ["AUTOPROF_STEPS"]:  # to import it takes seconds
    import torch
def arrived(meta): ...
def load(meta):
    return meta
def update(meta):
    if os.environ["AUTOPROF_STEPS"]:
        torch.ones(2) + 1
    return meta
"""
RECIPE = recipe(
    "loop",
    ("step", "Trainer.step", "step.wrap", 'number = "number"'),
    ("call", "Client.call", "step.send", 'carrier = "meta"'),
    ("called", "loop.work:arrived", "step.receive", 'carrier = "meta"'),
    ("update", "loop.work:update", "stage", 'stage = "update", role = "actor"'),
    ("load", "loop.work:load", "span", 'stage = "load", role = "actor", kind = "request"'),
)
FIT = "import json, loop\nprint(json.dumps(loop.Trainer().fit()))"


@pytest.fixture
def drive(tmp_path: Path, python: Python) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run code with the trainer and its recipe."""
    (tmp_path / "loop").mkdir()
    (tmp_path / "loop" / "__init__.py").write_text(LOOP)
    (tmp_path / "loop" / "worker.py").write_text(WORKER)
    (tmp_path / "loop" / "work.py").write_text(WORK)
    (tmp_path / "loop.toml").write_text(RECIPE)
    variables = {"AUTOPROF": "1", "AUTOPROF_STEPS": "", "AUTOPROF_RECIPES": str(tmp_path / "loop.toml")}
    return lambda code=FIT, **others: python(code, **variables | others, PYTHONPATH=str(tmp_path))


def in_worker(folder: Path) -> list[tuple[str, int | None]]:
    """Return the name and the step of each span of the worker."""
    (run,) = folder.glob("autoprof_runs/2*")
    return [(span["name"], span["step"]) for span in helpers.spans(run) if span["name"] in ("load", "update")]


def metas(folder: Path, *names: str) -> list[dict[str, Any]]:
    """Wait for the meta files of these captures, such as `5 update`, and return them. Fail if another one exists."""
    deadline = time.monotonic() + 120
    while True:
        files = sorted(folder.glob("autoprof_runs/latest/global_step_*/*.meta.json"))
        found = [json.loads(path.read_text()) for path in files]
        captures = [f"{meta['step']} {meta['stage']}" for meta in found]
        if captures == list(names):
            return found
        assert set(captures) <= set(names), captures
        assert time.monotonic() < deadline, captures
        time.sleep(0.05)


def test_every_step_arrives_the_first_one_too(tmp_path: Path, drive: Any) -> None:
    answers = json.loads(drive(AUTOPROF_STEPS="5,7").stdout)
    assert in_worker(tmp_path) == [("load", None), ("update", 5), ("update", 6), ("update", 7), ("load", None)]
    assert [meta["state"] for meta in metas(tmp_path, "5 update", "7 update")] == ["complete"] * 2
    # The trainer's own content arrives unchanged.
    assert [answer["theirs"] for answer in answers] == [1, 1, 1]


def test_a_whole_step_is_one_capture_which_ends_with_it(tmp_path: Path, drive: Any) -> None:
    drive(AUTOPROF_MODE="continuous", AUTOPROF_STEPS="5,7")
    for meta in metas(tmp_path, "5 step", "7 step"):
        assert (meta["state"], meta["reason"]) == ("complete", "")


def test_consecutive_steps_may_share_a_capture(tmp_path: Path, drive: Any) -> None:
    drive(AUTOPROF_MODE="continuous", AUTOPROF_STEPS="5,6", AUTOPROF_CONSECUTIVE="together")
    (meta,) = metas(tmp_path, "5 step")
    assert meta["steps"] == [5, 6]


def test_a_worker_without_autoprof_works_as_ever(tmp_path: Path, drive: Any) -> None:
    code = FIT.replace("import json, loop", "import json, loop, os; os.environ['AUTOPROF'] = '0'")
    assert [answer["theirs"] for answer in json.loads(drive(code).stdout)] == [1, 1, 1]
    assert in_worker(tmp_path) == []


@pytest.mark.parametrize("meta", ["'text'", "None"])
def test_a_carrier_that_is_no_dictionary_stays_as_it_is(drive: Any, meta: str) -> None:
    code = f"import json, loop\nloop.Trainer.meta = lambda self: {meta}\nprint(json.dumps(loop.Trainer().fit()))"
    for answer in json.loads(drive(code).stdout):
        assert answer == "text" if meta == "'text'" else set(answer) == {"autoprof"}


def test_an_argument_that_comes_by_position_stays_as_it_is(tmp_path: Path, drive: Any) -> None:
    module = tmp_path / "loop" / "__init__.py"
    module.write_text(LOOP.replace("name, *, meta=None", "name, meta=None").replace("meta=self.meta()", "self.meta()"))
    assert json.loads(drive().stdout) == [{"theirs": 1}] * 3


def test_foreign_content_of_the_carrier_is_ignored(tmp_path: Path, drive: Any) -> None:
    work = tmp_path / "loop" / "work.py"
    work.write_text(f"{WORK}\nwhole = arrived\n")
    worker = tmp_path / "loop" / "worker.py"
    worker.write_text(WORKER.replace("arrived(meta)", "arrived({'autoprof': 'something'})"))
    assert len(json.loads(drive().stdout)) == 3
    assert {step for _, step in in_worker(tmp_path)} == {None}


def test_a_call_that_is_overtaken_brings_no_older_step_back() -> None:
    reset()
    cluster.announce_step("run", StepAnnouncement(step=1, captured=False))
    first = cluster.announcement_to_send()
    cluster.announce_step("run", StepAnnouncement(step=2, captured=True))
    second = cluster.announcement_to_send()
    reset()
    assert cluster.receive_announcement(second)
    assert not cluster.receive_announcement(first)
    assert not cluster.receive_announcement(second)
    assert cluster.local_announcement() == cluster.announced_step("run") == StepAnnouncement(step=2, captured=True)
    assert cluster.own_announcement() == (False, None)
