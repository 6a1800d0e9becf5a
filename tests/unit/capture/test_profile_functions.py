"""Recordings with stacks beside profile functions of the program."""

from __future__ import annotations

import cProfile
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from autoprof.capture import recorder
from tests.support.captures import SUBJECT, captured, finished, work


def note(*event: Any) -> None:
    """Profile function that takes all events and does nothing."""


@pytest.fixture(autouse=True)
def none_left() -> Iterator[None]:
    yield
    sys.setprofile(None)
    threading.setprofile(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("set_function", [sys.setprofile, threading.setprofile])
def test_stacks_are_left_out_where_the_program_has_a_profile_function(
    set_function: Any, made: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run = made(contents=("cpu", "stack", "shapes"))
    set_function(note)
    recording = recorder.begin(run, SUBJECT)
    work()
    recording.stop()
    assert (sys.getprofile() is note) == (set_function is sys.setprofile)
    ((meta, trace),) = finished(run).values()
    reason = "stack is left out: the program has set the profile function note, which torch removes"
    assert (meta["state"], meta["contents"], meta["left_out"]) == ("complete", ["cpu", "shapes"], ["stack"])
    assert meta["reason"] == reason
    assert reason in caplog.text
    assert not [event for event in trace["traceEvents"] if event.get("cat") == "python_function"]


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="cProfile has no profile function from Python 3.12 on")
def test_a_running_cprofile_sees_a_captured_stage(made: Any) -> None:
    run = made(contents=("cpu", "stack"))
    profiler = cProfile.Profile()
    profiler.enable()
    recording = recorder.begin(run, SUBJECT)
    work()
    recording.stop()
    work()
    profiler.disable()
    assert {entry.callcount for entry in profiler.getstats() if entry.code is work.__code__} == {2}
    ((meta, _),) = finished(run).values()
    assert "the profile function Profile" in meta["reason"]


def test_a_profile_function_that_is_set_in_a_stage_outlives_the_recording(made: Any) -> None:
    run = made(contents=("cpu", "stack"))
    recording = recorder.begin(run, SUBJECT)
    work()
    sys.setprofile(note)
    recording.stop()
    assert sys.getprofile() is note
    ((meta, trace),) = finished(run).values()
    assert (meta["state"], meta["contents"]) == ("complete", ["cpu", "stack"])
    assert meta["reason"] == "stack ends where the program set a profile function (cProfile, sys.setprofile)"
    assert [event for event in trace["traceEvents"] if event.get("cat") == "python_function"]


def test_a_stage_without_profile_functions_has_no_remark(made: Any) -> None:
    run = made(contents=("cpu", "stack"))
    meta, _ = captured(run)
    assert (meta["state"], meta["contents"], meta["reason"]) == ("complete", ["cpu", "stack"], "")
    assert sys.getprofile() is None
