"""States of a capture: the table in `autoprof/capture/recorder.py`, with a tool that needs no torch."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autoprof.base import seam
from autoprof.capture import artifacts, profilers, recorder, whole_step, writer
from autoprof.capture.recorder import Capture, PassCapture
from autoprof.config.settings import Settings
from autoprof.run.runtime import Runtime
from autoprof.rundir import file_names
from tests.support.captures import SUBJECT
from tests.support.helpers import in_thread


class Tool(profilers.NothingTool):
    """Tool that writes an empty trace. `raises`: error to raise in each method, by its name."""

    name = "torch"
    ending = file_names.TRACE.removesuffix(".gz")
    remark = ""

    def __init__(self) -> None:
        self.raises: dict[str, BaseException] = {}
        self.calls: list[str] = []
        self.export_after = threading.Event()
        self.export_after.set()

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if error := self.raises.pop(name, None):
            raise error

    def start(self, settings: Settings, raw: Path) -> list[str]:
        self._called("start")
        return ["cpu"]

    def stop(self) -> None:
        self._called("stop")

    def abort(self) -> None:
        self._called("abort")

    def busy(self) -> str:
        return "another profiler is on" if self.raises.pop("busy", None) else ""

    def export(self, path: str) -> None:
        assert self.export_after.wait(20)
        self._called("export")
        Path(path).write_text('{\n  "traceEvents": [\n\n  ]}')


def fork(capture: Capture) -> None:
    recorder._state.after_fork_in_child()


EVENTS: dict[str, Callable[[Any], object]] = {
    "begin": lambda capture: capture.begin(),
    "stop": lambda capture: capture.stop(),
    "abort": lambda capture: capture.abort("it was aborted"),
    "fail": lambda capture: capture.fail("it failed"),
    "claim": lambda capture: capture.claim(),
    "close": lambda capture: capture.close(),
    "stop elsewhere": lambda capture: in_thread(capture.stop),
    "abort elsewhere": lambda capture: in_thread(lambda: capture.abort("it was aborted")),
    "other profiler": lambda capture: recorder.make_way("a profiler was started"),
    "other profiler elsewhere": lambda capture: in_thread(lambda: recorder.make_way("a profiler was started")),
    "suspend": lambda capture: recorder.suspend("a profiler"),
    "process ends": lambda capture: recorder._state.at_exit(),
    "fork": fork,
    "over budget": lambda capture: capture.keep_within_budget(),
    "before_pass": lambda capture: capture.before_pass(),
}
OWN, SIGNAL = RuntimeError("no"), KeyboardInterrupt()
NOTHING = ("waiting", None, "")
NO_START = "the profiler did not start: RuntimeError: no"
NO_END = "the recording could not be ended: RuntimeError: no"
NO_PASS = "the engine ran 1 forward passes; recording was to begin after 2"
LATE = "it was aborted, before the first forward pass that was to be recorded"


@pytest.mark.parametrize(
    ("events", "raises", "expected"),
    [
        ("", {}, NOTHING),
        ("stop", {}, NOTHING),
        ("abort", {}, NOTHING),
        ("begin, stop", {}, ("written", "complete", "")),
        ("begin, stop, stop, abort", {}, ("written", "complete", "")),
        ("begin, abort", {}, ("written", "truncated", "it was aborted")),
        ("begin, abort, abort, stop", {}, ("written", "truncated", "it was aborted")),
        ("begin, over budget", {}, ("written", "truncated", "it is too large")),
        ("begin, other profiler, stop", {}, ("written", "truncated", "a profiler was started")),
        ("begin, suspend, stop", {}, ("written", "truncated", "a profiler was started")),
        ("begin, process ends", {}, ("written", "truncated", "the process ended during the stage")),
        ("fail", {}, ("written", "failed", "it failed")),
        ("begin, fail, stop", {}, ("written", "failed", "it failed")),
        ("suspend, begin", {}, ("written", "failed", "a profiler is on in this step, so autoprof records nothing")),
        ("begin", {"busy": OWN}, NOTHING),
        ("begin, stop, abort", {"busy": OWN}, NOTHING),
        ("begin", {"start": artifacts.OverBudget("no room")}, ("written", "failed", "no room")),
        ("begin", {"start": OWN}, ("written", "failed", NO_START)),
        ("begin", {"start": OWN, "abort": OWN}, ("written", "failed", NO_START)),
        ("begin, abort", {"start": SIGNAL}, ("written", "failed", seam.AT_WORK)),
        ("begin", {"start": SIGNAL, "abort": SIGNAL}, ("written", "failed", seam.AT_WORK)),
        ("begin, stop", {"stop": OWN}, ("written", "failed", NO_END)),
        ("begin, stop, abort", {"stop": SIGNAL}, ("written", "failed", seam.AT_WORK)),
        ("begin, abort", {"stop": SIGNAL, "abort": SIGNAL}, ("written", "failed", seam.AT_WORK)),
        ("begin, stop", {"export": OWN}, ("written", "failed", "the trace could not be exported: no")),
        ("claim, abort", {}, ("written", "failed", "it was aborted")),
        ("begin, fork, stop", {}, ("recording", None, "")),
        (
            "begin, stop elsewhere, stop",
            {},
            ("written", "failed", "the stage ended in another thread than it began in"),
        ),
        (
            "begin, abort elsewhere, stop",
            {},
            ("written", "failed", "it was aborted, in another thread than the capture's"),
        ),
        (
            "begin, other profiler elsewhere, stop",
            {},
            ("written", "failed", "a profiler was started, in another thread than the capture's"),
        ),
    ],
)
def test_states_and_files_after_events(
    joined: Any, mocker: Any, events: str, raises: dict[str, BaseException], expected: tuple[str, str | None, str]
) -> None:
    run, tool = joined(stop_timeout_s=0.2), Tool()
    mocker.patch.object(artifacts.Budget, "exceeded", return_value="it is too large")
    tool.raises.update(raises)
    capture = Capture(run, SUBJECT, run.settings, tool)
    check(run, capture, events, expected)
    if expected[1] == "failed" and "start" in tool.calls:  # nothing still records
        assert tool.calls[-1] in ("abort", "stop", "export")


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ("before_pass, stop", NOTHING),
        ("before_pass, abort", NOTHING),
        (
            "before_pass, close",
            ("written", "failed", "the engine ran 1 forward passes; recording was to begin after 2"),
        ),
        ("before_pass, claim, abort", ("written", "failed", LATE)),
        ("before_pass, before_pass, before_pass, abort", ("written", "truncated", "it was aborted")),
        (f"{'before_pass, ' * 4}before_pass", ("written", "complete", "")),
    ],
)
def test_states_of_a_capture_whose_passes_begin_late(
    joined: Any, events: str, expected: tuple[str, str | None, str]
) -> None:
    run = joined()
    check(run, PassCapture(run, SUBJECT, run.settings, Tool(), (2, 4)), events, expected)


def wait_until_written(run: Runtime) -> None:
    """Wait until the finisher has written the meta file, which takes long on a busy machine."""
    for _ in range(3000):
        names = [path.name for path in run.rundir.path.glob(f"{file_names.STEP}*/*")]
        if any(name.endswith(file_names.META) for name in names) and not any(name.endswith(".part") for name in names):
            return
        time.sleep(0.02)


def check(run: Runtime, capture: Any, events: str, expected: tuple[str, str | None, str]) -> None:
    """Drive a capture, and compare its state and its meta file. Check that it leaves no other files."""
    for event in filter(None, events.split(", ")):
        try:
            EVENTS[event](capture)
        except (RuntimeError, KeyboardInterrupt) as error:
            assert error in (OWN, SIGNAL)
    capture.wait()
    if expected[1] is not None:
        wait_until_written(run)
    state, meta_state, reason = expected
    assert capture.state == state
    assert capture.ended.is_set() == (state == "written")
    assert recorder.current() is None
    names = [path.name for path in run.rundir.path.glob("*/*") if path.parent.name.startswith(file_names.STEP)]
    if meta_state is None:
        assert names == [name for name in names if name.endswith(file_names.TAKEN)]
        return
    (path,) = run.rundir.path.rglob(f"*{file_names.META}")
    meta = json.loads(path.read_text())
    assert (meta["state"], meta["reason"]) == (meta_state, reason)
    assert len(names) == (1 if meta_state == "failed" else 2)
    assert capture.problem == (reason if meta_state == "failed" and "export" not in capture.tool.calls else "")


def test_files_of_each_state(joined: Any) -> None:
    run, tool = joined(), Tool()
    tool.export_after.clear()
    capture = Capture(run, SUBJECT, run.settings, tool)

    def endings() -> list[str]:
        capture.artifacts.open()
        return sorted(
            path.name.removeprefix(capture.artifacts.name) for path in run.rundir.step(SUBJECT.step).iterdir()
        )

    assert endings() == [file_names.TAKEN]
    capture.begin()
    assert (capture.state, endings()) == ("recording", [file_names.TAKEN])
    capture.stop()
    assert (capture.state, endings()) == ("stopped", [file_names.TAKEN, f"{tool.ending}{file_names.PART}"])
    tool.export_after.set()
    writer.wait(20)
    wait_until_written(run)
    capture.wait()
    assert (capture.state, endings()) == ("written", [file_names.META, file_names.TRACE])


def test_an_interrupt_after_the_stop_keeps_the_trace(joined: Any) -> None:
    run, tool = joined(), Tool()
    capture = Capture(run, SUBJECT, run.settings, tool)
    capture.begin()
    capture.stop()
    capture.artifacts.abort(seam.AT_WORK)
    capture.wait()
    wait_until_written(run)
    (path,) = run.rundir.path.rglob(f"*{file_names.META}")
    assert json.loads(path.read_text())["state"] == "complete"
    assert "abort" not in tool.calls
    assert whole_step.current() is None
