"""Requests of `autoprof trigger`, from the command line to the captured step."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pytest_mock import MockerFixture

from autoprof.base.identity import HOST
from autoprof.behaviours import steps
from autoprof.behaviours.steps import Wrap
from autoprof.cli import doctor as run
from autoprof.cli import main, nodes
from autoprof.config.settings import Settings
from autoprof.config.values import SettingsError
from autoprof.hooks.behaviour import CALL, Call, Outcome, Wait
from autoprof.run import cluster, end, runtime
from autoprof.rundir import layout, runs
from autoprof.rundir.layout import RunDir, write_json
from autoprof.windows import chooser, requests
from autoprof.windows.chooser import OpenTriggers
from autoprof.windows.requests import Trigger

ASKED = {"reason": "autoprof trigger"}


@pytest.fixture
def going_on(tmp_path: Path) -> RunDir:
    """Return a run that this process has started."""
    run = RunDir(tmp_path / "autoprof_runs" / "20261120-101112-abcdef")
    write_json(run.run_json, {"id": run.path.name, "state": "running", "host": HOST, "pid": os.getpid()})
    run.point_latest()
    return run


def trigger(run: RunDir, *options: str) -> int:
    return main.main(["trigger", str(run.path), *options])


def take(run: RunDir) -> list[tuple[str, Trigger]]:
    return requests.take(run, requests.names(run))


def became(run: RunDir) -> list[tuple[str, list[int], str]]:
    """Return the outcome of the taken requests: state, captured steps and reason."""
    return [(each.state, each.captured, each.reason) for each in requests.states(run).values()]


def test_a_request_is_a_file_of_the_users_own(going_on: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert trigger(going_on, "--steps", "2", "--from", "7", "--contents", "cpu,shapes", "--ranks", "all") == 0
    (path,) = going_on.control.iterdir()
    assert re.fullmatch(r"[0-9]+-[0-9]+-[0-9a-f]{8}\.json", path.name)
    assert path.stat().st_mode & 0o777 == 0o600
    assert json.loads(path.read_text()) == {
        "run": "20261120-101112-abcdef",
        "steps": 2,
        "from": 7,
        "at": "",
        "overrides": {"contents": ["cpu", "shapes"], "ranks": "all"},
        "reason": "",
    }
    assert f"asked run 20261120-101112-abcdef for 2 steps from 7 on, in {path}\n" in capsys.readouterr().out


def test_latest_is_the_run_that_is_meant(
    going_on: RunDir, python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    assert "asked run 20261120-101112-abcdef for the next step" in python(["-m", "autoprof", "trigger"]).stdout
    assert requests.waiting(going_on)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "0"], "steps: got 0; it takes a number of steps from 1 to "),
        (["--from", "-1"], "from: got -1; it takes a step number from 0"),
        (["--at", "5:2"], "at: got '5:2' (5:2 is an empty range); it takes a step (2),"),
        (["--at", " "], "at: got ' '; it takes a step (2),"),
        (["--at", "5", "--from", "3"], "at: got '5'; it replaces steps and from; give it alone"),
        (["--at", "5", "--steps", "3"], "at: got '5'; it replaces steps and from; give it alone"),
        (["--ranks", "one"], "ranks: got 'one'"),
        (["--contents", "gpu"], "contents: got 'gpu' ('gpu' is unknown)"),
        (["--rollout-iterations", "3:3"], "rollout_iterations: got '3:3' (3:3 is empty)"),
        (
            ["--off", "--steps", "2"],
            "--off switches the whole run; it can't be combined with --wait or options of a window",
        ),
        (["--on", "--wait"], "--on switches the whole run; it can't be combined with --wait or options of a window"),
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
    assert "run 20261120-101112-abcdef is not running: its state is" in capsys.readouterr().err
    assert not going_on.control.exists()


def test_each_request_is_taken_once_in_their_order(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert take(run) == []
    asked = [requests.ask(run, Trigger(since=number)).name for number in (1, 2, 3)]
    assert [(name, one.since) for name, one in take(run)] == list(zip(asked, (1, 2, 3), strict=True))
    assert take(run) == []
    assert requests.waiting(run) == []


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "Input data was truncated"),
        ("{", "Input data was truncated"),
        ("[]", "Expected `object`, got `array`"),
        ('{"run": "RUN", "steps": "x"}', "Expected `int`, got `str` - at `$.steps`"),
        ('{"run": "RUN", "steps": 0}', "steps: got 0; it takes a number of steps"),
        ('{"run": "RUN", "at": "x"}', "at: got 'x' ('x' is neither a number nor a range)"),
        ('{"run": "RUN", "overrides": {"dir": "/"}}', "'dir': there is no such setting here"),
        ('{"run": "RUN", "when": 1}', "Object contains unknown field `when`"),
        ('{"run": "RUN", "became": {"state": "done"}}', "Object contains unknown field `became`"),
        ('{"steps": 1}', "it is for run ''"),
        ('{"run": "another"}', "it is for run 'another'"),
        ("x" * 70_000, "it has more than 65536 bytes"),
        (Path("/dev/null"), "it is a link"),
        (None, "Is a directory"),
    ],
)
def test_what_is_no_request_of_ours_is_refused_and_named(
    content: str | Path | None, reason: str, going_on: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    path = going_on.control / "0.json"
    requests.ask(going_on, Trigger())
    if content is None:
        path.mkdir()
    elif isinstance(content, Path):
        path.symlink_to(content)
    else:
        path.write_text(content.replace("RUN", going_on.path.name))
    assert [trigger for _, trigger in take(going_on)] == [Trigger(run=going_on.path.name)]
    assert f"{path} is refused: {reason}" in caplog.text
    refused = requests.states(going_on)["0.json"]
    assert (refused.state, refused.reason.startswith(reason)) == ("refused", True)
    # The request is kept for inspection.
    assert os.path.lexists(f"{path}.refused")
    report = run.examine_run(runs.read(going_on.path))
    assert any(problem.startswith(f"control/0.json: the request was refused: {reason}") for problem in report.problems)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_another_users_request_is_refused(going_on: RunDir) -> None:
    path = requests.ask(going_on, Trigger())
    os.chown(path, 4321, 4321)
    assert take(going_on) == []
    assert became(going_on) == [("refused", [], "it belongs to user 4321")]
    # The owner of the run may send requests.
    os.chown(going_on.path, 4321, 4321)
    os.chown(requests.ask(going_on, Trigger()), 4321, 4321)
    assert len(take(going_on)) == 1


def test_steps_that_are_named_count_from_when_they_were_asked_for(tmp_path: Path) -> None:
    run, windows = RunDir(tmp_path), OpenTriggers()
    requests.ask(run, Trigger(at="+1,+3"))
    windows.look(run, 100)
    assert [number for number in range(100, 102) if windows.match(number) is not None] == [100]
    assert windows.any_to_come
    assert [number for number in range(102, 110) if windows.match(number) is not None] == [102]
    assert not windows.any_to_come
    assert became(run) == [("done", [100, 102], "")]


def test_steps_that_are_counted_may_begin_later(tmp_path: Path) -> None:
    run, windows = RunDir(tmp_path), OpenTriggers()
    requests.ask(run, Trigger(steps=3, since=12))
    windows.look(run, 9)
    # A trainer may skip step numbers.
    assert [number for number in (9, 11, 13, 14, 18, 19) if windows.match(number) is not None] == [13, 14, 18]


def test_of_two_windows_the_last_decides_and_the_other_goes_on_after_it(tmp_path: Path) -> None:
    run, windows = RunDir(tmp_path), OpenTriggers()
    requests.ask(run, Trigger(steps=2))
    requests.ask(run, Trigger(overrides={"ranks": "all"}))
    windows.look(run, 1)
    matched = [windows.match(number) for number in range(1, 5)]
    assert matched == [{"ranks": "all"} | ASKED, ASKED, ASKED, None]
    assert became(run) == [("done", [2, 3], ""), ("done", [1], "")]


def test_the_same_request_made_twice_at_once_opens_one_window(tmp_path: Path) -> None:
    run, windows = RunDir(tmp_path), OpenTriggers()
    requests.ask(run, Trigger(steps=2))
    requests.ask(run, Trigger(steps=2))
    windows.look(run, 1)
    assert [windows.match(number) is not None for number in (1, 2, 3)] == [True, True, False]
    assert became(run) == [("done", [1, 2], ""), ("done", [1, 2], "")]


def test_what_becomes_of_a_request_is_written_when_it_changes(tmp_path: Path, mocker: MockerFixture) -> None:
    note = mocker.spy(requests, "note")
    run, windows = RunDir(tmp_path), OpenTriggers()
    requests.ask(run, Trigger(since=3))
    counts = []
    for number in range(1, 6):
        windows.look(run, number)
        windows.match(number)
        windows.ended()
        counts.append(note.call_count)
    assert counts == [1, 1, 3, 3, 3]


def test_named_steps_that_have_passed_say_so(tmp_path: Path) -> None:
    run, windows = RunDir(tmp_path), OpenTriggers()
    requests.ask(run, Trigger(at="3,5"))
    windows.look(run, 10)
    assert windows.match(10) is None
    assert became(run) == [("done", [], "its steps had passed when it was taken")]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")


@pytest.mark.usefixtures("ranks")
def test_all_ranks_capture_the_same_steps_whichever_begins_one_first(tmp_path: Path) -> None:
    """The first rank takes requests when it begins a step, which a further rank may have begun before."""
    run = RunDir(tmp_path)
    first, further = OpenTriggers(of_trainer=True), OpenTriggers(of_trainer=True)
    asked = {3: Trigger(steps=2), 5: Trigger(at="+1,9"), 6: Trigger(at="6"), 10: Trigger(overrides={"ranks": "all"})}
    matched: dict[int, list[Any]] = {0: [], 1: []}
    for step in range(1, 13):
        if step in asked:
            requests.ask(run, asked[step])
        if step == 4:
            (run.control / "7.json").write_text("nothing of the kind")
        for rank, windows in ((0, first), (1, further)) if step % 2 else ((1, further), (0, first)):
            windows.look(run, step, take_it=rank == 0)
            if windows.match(step) is not None:
                matched[rank].append(step)
    # The request for step 6 came when the further rank had begun it.
    assert matched[0] == matched[1] == [4, 5, 6, 9, 11]
    passed = "its steps had passed when it was taken"
    assert [each[1:] for each in became(run)[:4]] == [([4, 5], ""), ([6, 9], ""), ([], passed), ([11], "")]
    assert requests.waiting(run) == []
    # A rank that joins late does not read finished requests.
    late = OpenTriggers(of_trainer=True)
    late.look(run, 13, take_it=False)
    assert not late.any_to_come


@pytest.mark.usefixtures("ranks")
def test_a_further_rank_that_is_late_ends_with_the_others(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    first, further = OpenTriggers(of_trainer=True), OpenTriggers(of_trainer=True)
    requests.ask(run, Trigger(steps=3))
    first.look(run, 1)
    assert [first.match(step) for step in (1, 2)] == [None, ASKED]
    further.look(run, 3, take_it=False)
    assert [further.match(step) for step in (3, 4, 5)] == [ASKED, ASKED, None]


def test_a_resumed_run_takes_and_continues_the_requests_of_its_earlier_attempt(
    tmp_path: Path, mocker: MockerFixture
) -> None:
    run = RunDir(tmp_path)
    before = OpenTriggers(of_trainer=True)
    requests.ask(run, Trigger(steps=3))
    before.look(run, 40)
    assert [before.match(step) for step in (40, 41)] == [ASKED, ASKED]
    # A process that is running keeps its requests.
    other = OpenTriggers(of_trainer=True)
    other.look(run, 41)
    mocker.patch.object(requests, "is_held", return_value=False)
    # A server continues no requests of another process.
    server = OpenTriggers()
    server.look(run, 41)
    assert not other.any_to_come
    assert not server.any_to_come
    requests.ask(run, Trigger(at="44"))
    # The run continues from a checkpoint of step 40, so step 41 is executed again.
    resumed = OpenTriggers(of_trainer=True)
    matched = []
    for step in range(41, 46):
        resumed.look(run, step)
        matched += [step] * (resumed.match(step) is not None)
    assert matched == [41, 42, 44]
    assert became(run) == [("done", [40, 41, 42], ""), ("done", [44], "")]


def test_a_request_is_held_while_the_process_that_took_it_runs(tmp_path: Path) -> None:
    run, windows = RunDir(tmp_path), OpenTriggers()
    requests.ask(run, Trigger(steps=3))
    windows.look(run, 1)
    windows.match(1)
    (state,) = requests.states(run).values()
    assert requests.is_held(state)
    state.by = f"{HOST}-{2**22 + 1}"
    assert not requests.is_held(state)
    state.by = "another-1"
    assert not requests.is_held(state)


def test_a_step_lists_the_folder_once_and_makes_it_first(tmp_path: Path, mocker: MockerFixture) -> None:
    run, windows = RunDir(tmp_path / "run"), OpenTriggers(of_trainer=True)
    windows.look(run, 1)
    assert not run.path.exists()
    run.path.mkdir()
    windows = OpenTriggers(of_trainer=True)
    listed = mocker.spy(requests.os, "listdir")
    for step in range(1, 6):
        windows.look(run, step)
    assert run.control.is_dir()
    assert listed.call_count == 5


def test_a_control_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / layout.OFF).touch()
    run.control.symlink_to(tmp_path / "elsewhere")
    windows = OpenTriggers()
    windows.look(run, 1)
    assert not windows.off


def test_a_process_registers_once_and_a_store_that_fails_costs_no_step(
    tmp_path: Path, mocker: MockerFixture, caplog: pytest.LogCaptureFixture
) -> None:
    run, windows = RunDir(tmp_path), OpenTriggers()
    register = mocker.patch.object(chooser, "_register", side_effect=ConnectionError("no head"))
    windows.look(run, 1)
    mocker.patch.object(cluster, "is_up", return_value=True)
    requests.ask(run, Trigger())
    for step in (2, 3):
        windows.look(run, step)
    assert register.call_count == 1
    assert "autoprof trigger --ray can't find this run: ConnectionError: no head" in caplog.text
    assert windows.match(3) == ASKED


def test_a_task_on_the_node_of_the_trainer_writes_the_same_files(tmp_path: Path) -> None:
    run, windows, write = RunDir(tmp_path), OpenTriggers(), nodes.write
    for content in (b'{"off": true}', b"", b""):
        assert write(str(tmp_path), layout.OFF, content) is None
        windows.look(run, 1)
        assert windows.off == bool(content)
    name = requests.new_name()
    assert write(str(tmp_path), name, b'{"run": "%s"}' % tmp_path.name.encode()) is None
    assert requests.names(run) == [name]
    assert (run.control / name).stat().st_mode & 0o777 == (0o640 if tmp_path.stat().st_mode & 0o040 else 0o600)
    windows.look(run, 1)
    assert windows.match(1) == ASKED
    (tmp_path / "file").touch()
    assert write(str(tmp_path / "file"), name, b"x") == (20, "Not a directory", str(tmp_path / "file" / "control"))


def test_what_a_window_overrides_goes_before_a_roles_own() -> None:
    settings = Settings(ranks="0", contents=("cpu",), role={"actor": {"ranks": "3", "max_trace_mb": 5.0}})
    changed = settings.overridden({"ranks": "all", "contents": ["cpu", "shapes"]}).for_role("actor")
    assert (changed.ranks, changed.contents, changed.max_trace_mb) == ("all", ("cpu", "shapes"), 5.0)
    assert settings.overridden({}) is settings
    assert (settings.reason, settings.overridden(ASKED).reason) == ("", "autoprof trigger")
    with pytest.raises(SettingsError):
        settings.overridden({"dir": "/"})


class Trainer:
    """Trainer that announces nothing; the announcements are only noted."""

    def __init__(self, run: Any) -> None:
        self.run = run
        self.global_steps = 40

    def step(self) -> None:
        self.global_steps += 1
        around = Wrap(number="self.global_steps").around(
            Call("trainer/step", Trainer.step, (self,), {}, runtime.current())
        )
        wait: Wait | None = next(around)
        while wait is not CALL:
            wait = around.send(wait.block())
        try:
            wait = around.send(Outcome(None, None))
            while wait is not None:
                wait = around.send(wait.block())
        except StopIteration:
            pass


@pytest.fixture
def trainer(mocker: MockerFixture, tmp_path: Path) -> Trainer:
    settings = Settings(steps="42")
    run = SimpleNamespace(settings=settings, info=SimpleNamespace(id="run"), rundir=RunDir(tmp_path))
    run.timeline = SimpleNamespace(listener=None, watch_work=lambda work: None)
    run.decides = True
    run.hooks = SimpleNamespace(versions={})
    mocker.patch.object(runtime, "current", return_value=run)
    mocker.patch.object(steps, "Span")
    mocker.patch.object(end, "window_passed")
    return Trainer(run)


def test_a_request_opens_the_step_that_begins_next(trainer: Trainer, mocker: MockerFixture) -> None:
    post = mocker.patch.object(cluster, "announce_step")
    for asked in ({}, {"contents": ("cpu",)}, None, {"ranks": "all"}):
        if asked is not None:
            requests.ask(trainer.run.rundir, Trigger(at="" if asked != {} else "41,+4", overrides=asked))
        trainer.step()
    announced = [call.args[1] for call in post.call_args_list if call.args[1] is not None]
    assert [(posting.step, posting.captured, posting.overrides) for posting in announced] == [
        (41, True, ASKED),
        (42, True, {"contents": ("cpu",)} | ASKED),
        (43, False, {}),
        (44, True, {"ranks": "all"} | ASKED),
    ]


def test_what_comes_after_the_last_window_is_done_once_for_each(trainer: Trainer, mocker: MockerFixture) -> None:
    passed = mocker.patch.object(end, "window_passed")
    counts = []
    for number in range(41, 47):
        if number == 45:
            requests.ask(trainer.run.rundir, Trigger())
        trainer.step()
        counts.append(passed.call_count)
    assert counts == [0, 1, 1, 1, 2, 2]


def test_a_request_is_told_why_nothing_was_captured(trainer: Trainer) -> None:
    run = trainer.run.rundir
    trainer.run.settings = Settings(steps="", max_steps=1)
    requests.ask(run, Trigger(steps=3))
    trainer.step()
    trainer.step()
    full = "AUTOPROF_MAX_STEPS: 1 steps were captured, and no more will be"
    assert became(run) == [("done", [41], full)]
    requests.switch(run, off=True)
    requests.ask(run, Trigger(at="43"))
    trainer.step()
    assert became(run)[1:] == [("done", [], "step 43: autoprof is switched off in this run")]


def test_steps_that_are_counted_wait_while_autoprof_is_off(trainer: Trainer) -> None:
    run = trainer.run.rundir
    trainer.run.settings = Settings(steps="")
    requests.ask(run, Trigger(steps=2))
    for number in range(5):
        if number in (1, 3):
            requests.switch(run, off=number == 1)
        trainer.step()
    assert became(run) == [("done", [41, 44], "")]


def test_a_request_to_a_deleted_run_makes_no_directory(tmp_path: Path) -> None:
    error = nodes.write(str(tmp_path / "run"), "a.json", b"{}")
    assert error is not None
    assert error[0] == errno.ENOENT
    assert list(tmp_path.iterdir()) == []


def test_a_fifo_among_the_requests_is_an_empty_request(tmp_path: Path) -> None:
    (tmp_path / "control").mkdir()
    fifo = tmp_path / "control" / "a.json"
    os.mkfifo(fifo)
    writer = os.open(fifo, os.O_RDWR)
    try:
        assert nodes.look(str(tmp_path), [])["requests"] == {"a.json": {}}
    finally:
        os.close(writer)


def test_root_hands_a_request_over_by_its_descriptor_not_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mocker: MockerFixture
) -> None:
    (tmp_path / "control").mkdir()
    status = os.stat_result((0o40750, 0, 0, 1, 4321, 4321, 0, 0, 0, 0))
    by_descriptor, by_name, modes = mocker.Mock(), mocker.Mock(), mocker.Mock()
    with monkeypatch.context() as patch:
        for name, stand_in in (("fchown", by_descriptor), ("chown", by_name), ("fchmod", modes)):
            patch.setattr(os, name, stand_in)
        patch.setattr(os, "geteuid", lambda: 0)
        patch.setattr(os, "stat", lambda path: status)
        assert nodes.write(str(tmp_path), "a.json", b"{}") is None
    assert by_descriptor.call_args.args[1:] == (4321, 4321)
    assert modes.call_args.args[1] == 0o640
    assert not by_name.called
