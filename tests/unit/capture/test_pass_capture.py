"""Captures of some passes: their begin and end, and the meta file if no pass was recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pytest_mock import MockerFixture

from autoprof.capture import recorder
from autoprof.capture.artifacts import OverBudget, Subject
from autoprof.capture.profilers.torch import TorchTool
from autoprof.capture.recorder import PassCapture
from autoprof.run.runtime import Runtime
from tests.support.helpers import in_thread
from tests.support.npu_records import meta_file

SUBJECT = Subject(step=3, role="rollout", stage="rollout", rank=0, replica=0, part="rank0")
Make = Callable[..., PassCapture]


@pytest.fixture
def run(joined: Any) -> Runtime:
    return joined(contents=("cpu",))


@pytest.fixture
def make(run: Runtime) -> Make:
    return lambda first, stop: PassCapture(run, SUBJECT, run.settings, TorchTool(), (first, stop))


@pytest.mark.parametrize(
    ("part", "recorded"), [((0, None), [0, 1, 2, 3, 4]), ((0, 2), [0, 1]), ((2, 4), [2, 3]), ((3, 9), [3, 4])]
)
def test_passes_are_recorded_from_the_first_to_the_one_to_stop_before(
    run: Runtime, make: Make, part: tuple[int, int | None], recorded: list[int]
) -> None:
    capture = make(*part)
    assert [number for number in range(5) if capture.before_pass()] == recorded
    capture.stop()
    assert capture.close() == ""
    assert (meta_file(run)["state"], capture.passed) == ("complete", 5)
    assert recorder.current() is None


def test_passes_that_are_counted_at_their_end_begin_with_the_next(run: Runtime, make: Make) -> None:
    capture = make(1, 3)
    recording = []
    for _ in range(4):
        capture.after_pass()
        recording.append(capture.recording)
    assert recording == [True, True, False, False]
    capture.close()


def test_a_pass_in_another_thread_does_not_end_it(run: Runtime, make: Make) -> None:
    capture = make(0, 1)
    capture.before_pass()
    in_thread(capture.before_pass)
    assert capture.recording
    capture.stop()
    assert meta_file(run)["state"] == "complete"


def test_a_process_that_records_already_goes_on_and_nothing_is_left(run: Runtime, make: Make) -> None:
    outer = recorder.begin(run, Subject(step=3, role="actor", stage="update", rank=0))
    capture = make(0, None)
    assert not capture.before_pass()
    capture.stop()
    assert outer is not None
    assert not outer.ended.is_set()
    outer.stop()
    assert meta_file(run)["role"] == "actor"
    assert capture.state == "waiting"


@pytest.mark.parametrize(
    ("error", "reason"),
    [(OverBudget("no room"), "no room"), (RuntimeError("no"), "the profiler did not start: RuntimeError: no")],
)
def test_a_profiler_that_does_not_start_is_given_back_and_said(
    run: Runtime, make: Make, mocker: MockerFixture, error: Exception, reason: str
) -> None:
    mocker.patch.object(TorchTool, "start", side_effect=error)
    capture = make(0, None)
    if isinstance(error, OverBudget):  # no fault of autoprof's
        capture.reach()
    else:
        with pytest.raises(RuntimeError):
            capture.reach()
    assert recorder.current() is None
    assert not capture.before_pass()
    assert capture.close() == reason
    assert (meta_file(run)["state"], meta_file(run)["reason"]) == ("failed", reason)


def test_a_disk_that_is_full_at_the_end_is_said(run: Runtime, make: Make, mocker: MockerFixture) -> None:
    capture = make(0, None)
    capture.before_pass()
    mocker.patch.object(capture.artifacts, "write", side_effect=OSError(28, "No space left"))
    with pytest.raises(OSError, match="No space"):
        capture.stop()
    assert "No space" in capture.close()
    assert "No space" in meta_file(run)["reason"]
