"""`autoprof trigger --off` and `--on`: autoprof does nothing in a running run, and works again later."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pytest_mock import MockerFixture

from autoprof.base.identity import HOST
from autoprof.behaviours import serving
from autoprof.cli import main
from autoprof.run import cluster
from autoprof.run.runtime import Runtime
from autoprof.rundir.layout import write_json
from tests.support import helpers
from tests.support.captures import finished


@pytest.fixture
def run(joined: Any, mocker: MockerFixture) -> Iterator[Runtime]:
    made: Runtime = joined(steps="0:100")
    write_json(made.rundir.run_json, {"id": "run", "state": "running", "host": HOST, "pid": os.getpid()})
    yield made
    cluster.announce_step("run", None)


def switch(run: Runtime, to: str) -> int:
    return main.main(["trigger", str(run.rundir.path), f"--{to}"])


def captured(run: Runtime) -> set[int]:
    finished(run)
    return {json.loads(path.read_text())["step"] for path in run.rundir.path.glob("*/*.meta.json")}


def spans(run: Runtime) -> list[tuple[str, int]]:
    return [(span["name"], span["step"]) for span in helpers.spans(run.rundir.path)]


@pytest.mark.fault("autoprof trigger --off", "goes on without autoprof", "what it would have left")
def test_nothing_is_done_from_the_next_step_on_until_it_is_switched_on(
    run: Runtime, hooked: Any, mocker: MockerFixture, capsys: Any, caplog: Any
) -> None:
    stage = hooked(lambda: torch.ones(3).sin(), "stage", role="actor", stage="update_actor")
    opened = hooked(lambda: None, "stage.begin", role="actor", stage="opened")
    span = hooked(lambda: None, "span", role="trainer", stage="validate")
    generate = hooked(lambda: None, "rollout.around")

    def work(number: int) -> int:
        for part in (stage, opened, span, generate):
            part()
        return number

    trained = hooked(work, "step.wrap", number="number")
    post = mocker.spy(cluster, "announce_step")
    for number in range(6):
        if number == 2:
            assert switch(run, "off") == 0
        if number == 4:
            assert switch(run, "on") == 0
        assert trained(number) == number
    assert captured(run) == {0, 1, 4, 5}
    assert {number for _, number in spans(run)} == {0, 1, 4, 5}
    # One listing when it is switched off; later steps only look at one file.
    assert [call.args[1].off for call in post.call_args_list if call.args[1]] == [False, False, True, False, False]
    assert "switched off in run run from the next step on" in capsys.readouterr().out
    assert caplog.text.count("autoprof is switched off in this run") == 1
    assert caplog.text.count("autoprof is switched on again in this run") == 1


def test_a_server_without_a_trainer_is_switched_off_too(run: Runtime) -> None:
    no_engine: Any = None
    counted = serving.Batches(no_engine, no_engine, no_engine)
    chosen = []
    for number in range(1, 7):
        if number == 3:
            switch(run, "off")
        if number == 5:
            switch(run, "on")
        counted.look(run)
        if counted.begin(run) is not None:
            chosen.append(number)
        counted.end()
    assert chosen == [1, 2, 5, 6]


def test_ls_says_that_a_run_is_off(run: Runtime, capsys: Any) -> None:
    switch(run, "off")
    capsys.readouterr()
    assert main.main(["ls", str(run.rundir.path)]) == 0
    assert "running (off)" in capsys.readouterr().out
    main.main(["doctor", str(run.rundir.path)])
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "control/off: autoprof was switched off in the run, so later steps were not recorded; autoprof trigger" in shown
    )
    assert switch(run, "on") == 0
    assert main.main(["ls", str(run.rundir.path)]) == 0
    assert "(off)" not in capsys.readouterr().out.splitlines()[-1]


def test_on_and_off_at_once_are_wrong_use(run: Runtime) -> None:
    assert main.main(["trigger", str(run.rundir.path), "--off", "--on"]) == 2
