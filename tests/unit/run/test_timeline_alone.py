"""Runs with an empty `AUTOPROF_STEPS`: a timeline without captures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autoprof.config.settings import load
from tests.support.helpers import Python, spans
from tests.support.small_trainer import warnings


def test_a_run_leaves_its_timeline_and_no_capture(go: Python, tmp_path: Path, python: Python) -> None:
    result = go("Trainer().fit()", AUTOPROF_STEPS="", AUTOPROF_MODE="continuous")
    assert warnings(result) == []
    run = (tmp_path / "autoprof_runs" / "latest").resolve()
    assert sorted(path.name for path in run.iterdir()) == ["control", "exit_status", "journal", "run.json"]
    assert [(span["kind"], span["step"]) for span in spans(run)] == [
        (kind, step) for step in (1, 2, 3) for kind in ("stage", "step")
    ]
    assert json.loads((run / "run.json").read_text())["settings"]["steps"] == ""

    examined = python(["-m", "autoprof", "doctor", "latest"]).stdout
    assert "no problems found" in examined
    assert "settings: the timeline alone\n" in examined
    assert "1-3" in examined
    assert run.name in python(["-m", "autoprof", "ls"]).stdout
    assert python(["-m", "autoprof", "ls", "latest"]).returncode == 0


def test_a_window_can_still_be_opened(go: Python, tmp_path: Path) -> None:
    code = """
from autoprof.cli import main
trainer = Trainer()
trainer.fit(inside=lambda: main.main(["trigger", "latest", "--from", "3", "--contents", "cpu"]))
"""
    go(code, AUTOPROF_STEPS="")
    run = (tmp_path / "autoprof_runs" / "latest").resolve()
    assert [path.name for path in run.glob("global_step_*")] == ["global_step_000003"]


@pytest.mark.parametrize("text", ["", " "])
def test_empty_steps_are_none_and_are_stronger_than_the_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "autoprof.toml").write_text('steps = "5"\n')
    assert load({"AUTOPROF_STEPS": text}, tmp_path).steps == ""
    assert load({}, tmp_path).steps == "5"
    (tmp_path / "autoprof.toml").write_text('steps = ""\n')
    assert load({}, tmp_path).steps == ""
