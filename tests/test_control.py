"""Requests of `autoprof trigger`, from the command line to the step they open."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pytest_mock import MockerFixture

from autoprof import cli, control, runtime
from autoprof.behaviours import step
from autoprof.behaviours.step import Wrap
from autoprof.choosing import Chooser
from autoprof.control import Trigger, Windows
from autoprof.rundir import HOST, RunDir, write_json
from autoprof.settings import Settings, SettingsError
from autoprof.wrapping import CALL, Call, Outcome, Wait

ASKED = {"reason": "autoprof trigger"}


@pytest.fixture
def going_on(tmp_path: Path) -> RunDir:
    """A run that this process started."""
    run = RunDir(tmp_path / "autoprof_runs" / "20261120-101112-abcdef")
    write_json(run.run_json, {"id": run.path.name, "state": "running", "host": HOST, "pid": os.getpid()})
    run.point_latest()
    return run


def trigger(run: RunDir, *options: str) -> int:
    return cli.main(["trigger", str(run.path), *options])


def test_a_request_is_a_file_of_the_users_own(going_on: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert trigger(going_on, "--steps", "7,+2", "--contents", "cpu,shapes", "--ranks", "all") == 0
    (path,) = going_on.control.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    assert json.loads(path.read_text()) == {
        "steps": "7,+2",
        "overrides": {"contents": ["cpu", "shapes"], "ranks": "all"},
        "reason": "",
    }
    assert "asked run 20261120-101112-abcdef for steps 7,+2" in capsys.readouterr().out


def test_latest_is_the_run_that_is_meant(
    going_on: RunDir, python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    assert "asked run 20261120-101112-abcdef" in python(["-m", "autoprof", "trigger"]).stdout
    assert control.waiting(going_on)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", ""], "steps: got ''; it takes a step (2),"),
        (["--steps", "5:2"], "steps: got '5:2' (5:2 is an empty range); it takes a step (2),"),
        (["--ranks", "one"], "ranks: got 'one'"),
        (["--contents", "gpu"], "contents: got 'gpu' ('gpu' is unknown)"),
        (["--rollout-iterations", "3:3"], "rollout_iterations: got '3:3' (3:3 holds nothing)"),
    ],
)
def test_a_wrong_value_is_refused_and_nothing_is_asked(
    options: list[str], message: str, going_on: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trigger(going_on, *options) == 2
    assert message in capsys.readouterr().err
    assert not going_on.control.exists()


@pytest.mark.parametrize("state", [{"state": "ended"}, {"state": "running", "pid": 2**22 + 1}])
def test_a_run_that_is_over_is_not_asked(
    state: dict[str, Any], going_on: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    write_json(going_on.run_json, json.loads(going_on.run_json.read_text()) | state)
    assert trigger(going_on) == 1
    assert "run 20261120-101112-abcdef is not going on: its state is" in capsys.readouterr().err
    assert not going_on.control.exists()


def test_each_request_is_taken_once_in_their_order(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert control.take(run) == []
    asked = [Trigger(steps=f"+{number}") for number in (1, 2, 3)]
    for one in asked:
        control.ask(run, one)
    assert sorted(one.steps for one in control.take(run)) == ["+1", "+2", "+3"]
    assert control.take(run) == []
    assert control.waiting(run) == []


@pytest.mark.parametrize("content", ["", "{", "[]", '{"steps": "x"}', '{"overrides": {"dir": "/"}}', '{"when": 1}'])
def test_a_request_that_is_none_is_refused_and_the_others_are_taken(
    content: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = RunDir(tmp_path)
    control.ask(run, Trigger())
    (run.control / "0.json").write_text(content)
    assert control.take(run) == [Trigger()]
    assert control.refused(run) == ["0.json"]
    assert "0.json is refused: " in caplog.text


def test_the_ordinals_of_a_window_count_from_when_it_was_taken(tmp_path: Path) -> None:
    run, windows = RunDir(tmp_path), Windows()
    control.ask(run, Trigger(steps="+1,+3"))
    windows.look(run, executed=6)
    assert [number for number in range(100, 102) if windows.match(number, number - 93) is not None] == [100]
    assert windows
    assert [number for number in range(102, 110) if windows.match(number, number - 93) is not None] == [102]
    assert not windows


def test_a_further_rank_reads_what_rank_0_takes(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    first, further = Windows(), Windows()
    further.look(run, 0, take_it=False)
    control.ask(run, Trigger(steps="5"))
    further.look(run, 3, take_it=False)  # before it is taken
    first.look(run, 3)
    control.ask(run, Trigger(steps="6"))
    (tmp_path / "control" / "7.json").write_text("nothing of the kind")
    first.look(run, 4)
    further.look(run, 4, take_it=False)  # after
    further.look(run, 4, take_it=False)
    assert control.waiting(run) == []
    assert len(control.refused(run)) == 1
    for windows in (first, further):
        assert [windows.match(step, step) for step in (5, 6, 7)] == [ASKED, ASKED, None]


def test_what_a_window_overrides_goes_before_a_roles_own() -> None:
    settings = Settings(ranks="0", contents=("cpu",), role={"actor": {"ranks": "3", "max_trace_mb": 5.0}})
    changed = settings.overridden({"ranks": "all", "contents": ["cpu", "shapes"]}).for_role("actor")
    assert (changed.ranks, changed.contents, changed.max_trace_mb) == ("all", ("cpu", "shapes"), 5.0)
    assert settings.overridden({}) is settings
    assert (settings.reason, settings.overridden(ASKED).reason) == ("", "autoprof trigger")
    with pytest.raises(SettingsError):
        settings.overridden({"dir": "/"})


class Trainer:
    """Posts nothing: what its steps announce is noted."""

    def __init__(self, run: Any) -> None:
        self.run = run
        self.global_steps = 40

    def step(self) -> None:
        self.global_steps += 1
        around = Wrap(number="self.global_steps").around(Call("trainer/step", Trainer.step, (self,), {}))
        wait: Wait | None = next(around)
        while wait is not CALL:
            wait = around.send(wait.block())
        wait = around.send(Outcome(None, None))
        try:
            while wait is not None:
                wait = around.send(wait.block())
        except StopIteration:
            pass


@pytest.fixture
def trainer(mocker: MockerFixture, tmp_path: Path) -> Trainer:
    settings = Settings(steps="42")
    run = SimpleNamespace(settings=settings, info=SimpleNamespace(id="run"), rundir=RunDir(tmp_path), teller=None)
    mocker.patch.object(runtime, "current", return_value=run)
    mocker.patch.object(step, "Span")
    mocker.patch.object(step.ending, "window_passed")
    mocker.patch.multiple(step, _current=None, _executed=0, _chooser=Chooser())
    return Trainer(run)


def test_a_request_opens_the_step_that_begins_next(trainer: Trainer, mocker: MockerFixture) -> None:
    post = mocker.patch.object(step.board, "post")
    for asked in ({}, {"contents": ("cpu",)}, None, {"ranks": "all"}):
        if asked is not None:
            control.ask(trainer.run.rundir, Trigger(steps="+1" if asked != {} else "41,+4", overrides=asked))
        trainer.step()
    announced = [call.args[1] for call in post.call_args_list if call.args[1] is not None]
    assert [(posting.step, posting.captured, posting.overrides) for posting in announced] == [
        (41, True, ASKED),
        (42, True, {"contents": ("cpu",)} | ASKED),
        (43, False, {}),
        (44, True, {"ranks": "all"} | ASKED),
    ]


def test_what_comes_after_the_last_window_is_done_once_for_each(trainer: Trainer, mocker: MockerFixture) -> None:
    passed = mocker.patch.object(step.ending, "window_passed")
    counts = []
    for number in range(41, 47):
        if number == 45:
            control.ask(trainer.run.rundir, Trigger())
        trainer.step()
        counts.append(passed.call_count)
    assert counts == [0, 1, 1, 1, 2, 2]
