"""Samples and rewards that end with an exception: a line with the place, and the findings made of it."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autoprof.base import identity
from autoprof.report import build
from autoprof.run import raised
from autoprof.run.journal import Span
from autoprof.run.runtime import Runtime
from autoprof.rundir import processes, runs
from autoprof.rundir.records import RaisedLine


@pytest.fixture
def run(made: Callable[..., Runtime]) -> Runtime:
    return made()


def failed(run: Runtime, kind: str, error: BaseException, sample: int = 1, step: int = 2) -> None:
    """Let an exception leave a span, and the sample around it."""
    sample_ids = {"sample": sample}
    spans = [
        Span(run.timeline, each, name, step=step, role="agent_loop", rank=None, ids=sample_ids)
        for each, name in (("sample", "agent_loop"), (kind, "search" if kind == "tool" else "compute_score"))
    ]
    for span in reversed(spans):
        run.timeline.running.add(span)
        span.end(error)


def fetch_score(text: str) -> ValueError:
    """Return an exception that was raised here."""
    try:
        raise ValueError(text)
    except ValueError as error:
        return error


def lines(run: Runtime) -> list[RaisedLine]:
    run.timeline.flush()
    (state,) = processes.read(run.rundir.path)
    return state.lost


def test_an_exception_that_leaves_a_reward_and_its_sample_has_one_line(run: Runtime) -> None:
    failed(run, "reward", fetch_score("no score"))
    (line,) = lines(run)
    assert (line.span, line.name, line.step) == ("reward", "compute_score", 2)
    assert (line.exception.type, line.exception.message) == ("ValueError", "no score")
    assert line.exception.frames[-1].function == "fetch_score"


def test_it_is_written_at_once_although_other_samples_are_open(run: Runtime) -> None:
    run.timeline.running.add(Span(run.timeline, "sample", "long", step=2, role="agent_loop", rank=None))
    failed(run, "reward", fetch_score("no score"))
    (state,) = processes.read(run.rundir.path)
    assert [line.exception.message for line in state.lost] == ["no score"]


def test_a_tools_exception_that_leaves_the_sample_is_the_samples(run: Runtime) -> None:
    failed(run, "tool", fetch_score("no answer"))
    assert [(line.span, line.exception.frames[-1].function) for line in lines(run)] == [("sample", "fetch_score")]


@pytest.mark.parametrize("error", [asyncio.CancelledError(), StopAsyncIteration(), KeyboardInterrupt()])
def test_what_is_no_fault_has_none(run: Runtime, error: BaseException) -> None:
    failed(run, "reward", error)
    failed(run, "reward", fetch_score("a fault"))
    assert [line.exception.message for line in lines(run)] == ["a fault"]


def test_of_many_alike_some_are_told_and_again_after_a_megabyte(run: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    for sample in range(200):
        failed(run, "reward", fetch_score("no score"), sample)
    for kind in range(30):
        failed(run, "reward", type(f"Error{kind}", (Exception,), {})())
    assert len(lines(run)) == 20
    monkeypatch.setattr(raised, "LIMIT_BYTES", 0)
    Span(run.timeline, "stage", "update", step=2, role="actor", rank=0).end()
    failed(run, "reward", fetch_score("later"))
    assert len(lines(run)) == 21


def test_they_do_not_end_a_run_that_goes_on(run: Runtime) -> None:
    failed(run, "reward", fetch_score("no score"))
    run.timeline.flush()
    (state,) = processes.read(run.rundir.path)
    assert state.raised is None


@pytest.mark.parametrize("steps", [[2], [7]], ids=["in detail", "elsewhere"])
def test_report_and_doctor_tell_the_place(
    run: Runtime, autoprof: Callable[..., subprocess.CompletedProcess[str]], steps: list[int]
) -> None:
    for step in (2, 7):
        Span(run.timeline, "step", "step", step=step, role="trainer", rank=0).end()
    failed(run, "reward", fetch_score("no score"))
    failed(run, "reward", fetch_score("no score"))
    run.timeline.flush()
    said = "reward compute_score ended with ValueError: no score in test_exceptions.py:"
    path = Path(run.rundir.path)
    found = [each for each in build.figures(runs.read(path), steps).findings if each.kind == "failed_samples"]
    assert [each.step for each in found] == [2]
    assert said in "\n".join([found[0].text, *found[0].evidence])
    known = {"id": "run", "started": 1795200000.0, "state": "ended", "host": identity.HOST, "pid": 1, "hosts": ["n1"]}
    (path / "run.json").write_text(json.dumps(known))
    examined = autoprof("doctor", str(path))
    assert examined.stdout.count(f"  - step 2: {said}") == 1


def test_a_file_and_a_text_that_are_no_utf_8_are_told(run: Runtime) -> None:
    code = compile("def fetch_score(): raise ValueError('no \\udcff')", "/home/u/caf\udce9.py", "exec")
    names: dict[str, Any] = {}
    exec(code, names)
    try:
        names["fetch_score"]()
    except ValueError as error:
        failed(run, "reward", error)
    (line,) = lines(run)
    assert (line.exception.message, line.exception.frames[-1].file) == ("no \\udcff", "/home/u/caf\\udce9.py")
