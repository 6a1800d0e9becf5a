"""Limits of recordings: free disk space, size estimated from the previous recording, number of steps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pytest_mock import MockerFixture

from autoprof.capture import artifacts, recorder, writer
from autoprof.capture.artifacts import Budget, OverBudget
from autoprof.cli import doctor_environment as environment
from autoprof.cli.documents import Report
from autoprof.config.settings import Settings
from autoprof.run import cluster
from autoprof.run.runtime import Runtime
from autoprof.rundir.layout import RunDir
from autoprof.windows.chooser import Chooser
from autoprof.windows.requests import Trigger, ask
from tests.support.captures import finished

MB = 1_000_000


@pytest.fixture(autouse=True)
def _nothing_before() -> Iterator[None]:
    artifacts._state.before.clear()
    yield
    artifacts._state.before.clear()


@pytest.fixture
def clock(mocker: MockerFixture) -> Any:
    """Replace the clock of `budget`. Return the object with its seconds."""
    shown = SimpleNamespace(seconds=100.0)
    mocker.patch.object(artifacts.time, "monotonic", side_effect=lambda: shown.seconds)
    return shown


@pytest.fixture
def disk(mocker: MockerFixture) -> Any:
    """Replace the free disk space. Return the object with its megabytes."""
    shown = SimpleNamespace(free=5000)
    stat = lambda _: SimpleNamespace(f_bavail=shown.free * 1000, f_frsize=1000)  # noqa: E731
    mocker.patch.object(artifacts.os, "statvfs", stat)
    return shown


def recorded(clock: Any, folder: Path, seconds: float, size_mb: int, **settings: float) -> None:
    """Note a recording of step 2 with this duration and size."""
    before = Budget(Settings(**settings), "actor.update", 2, folder)
    clock.seconds += seconds
    before.written(size_mb * MB, seconds)


def test_a_floor_is_left_free(clock: Any, disk: Any, tmp_path: Path) -> None:
    disk.free = 999
    with pytest.raises(OverBudget) as raised:
        Budget(Settings(min_free_mb=1000), "actor.update", 2, tmp_path)
    assert str(raised.value) == (
        "not recorded: the disk has 999 MB free and needs 1,000 MB to stay free (AUTOPROF_MIN_FREE_MB)"
    )
    disk.free = 1000
    Budget(Settings(min_free_mb=1000), "actor.update", 2, tmp_path)


def test_the_trace_before_says_how_much_room_the_next_takes(clock: Any, disk: Any, tmp_path: Path) -> None:
    recorded(clock, tmp_path, 10, 600)
    disk.free = 1599
    with pytest.raises(
        OverBudget, match=r"1,599 MB free .* 1,024 MB to stay free and 600 MB for the trace, the size in step 2"
    ):
        Budget(Settings(), "actor.update", 4, tmp_path)
    Budget(Settings(), "ref.log_prob", 4, tmp_path)
    # The estimate is at most the limit of a trace.
    Budget(Settings(max_trace_mb=500), "actor.update", 4, tmp_path)


def test_a_recording_ends_when_it_would_be_too_large(clock: Any, disk: Any, tmp_path: Path) -> None:
    recorded(clock, tmp_path, 10, 600)
    going_on = Budget(Settings(max_trace_mb=300), "actor.update", 4, tmp_path)
    clock.seconds += 5
    assert going_on.exceeded(str(tmp_path / "raw")) == ""
    clock.seconds += 0.6
    assert going_on.exceeded(str(tmp_path / "raw")) == (
        "the trace would pass 300 MB (AUTOPROF_MAX_TRACE_MB) at the 60 MB a second of step 2"
    )


def test_a_recording_ends_when_the_disk_runs_full(clock: Any, disk: Any, tmp_path: Path) -> None:
    going_on = Budget(Settings(), "actor.update", 2, tmp_path)
    clock.seconds += 1
    assert going_on.exceeded(str(tmp_path / "raw")) == ""
    disk.free = 1000
    clock.seconds += 0.1
    assert going_on.exceeded(str(tmp_path / "raw")) == ""  # it has just looked
    clock.seconds += 1
    assert going_on.exceeded(str(tmp_path / "raw")) == "less than 1,024 MB is free on the disk (AUTOPROF_MIN_FREE_MB)"


def test_what_is_on_the_disk_while_it_is_recorded_is_measured(clock: Any, disk: Any, tmp_path: Path) -> None:
    going_on = Budget(Settings(max_trace_mb=1), "actor.update", 2, tmp_path)
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "data").write_bytes(bytes(2 * MB))
    clock.seconds += 1
    assert going_on.exceeded(str(raw)) == "the trace is over 1 MB (AUTOPROF_MAX_TRACE_MB)"


@pytest.fixture
def update(hooked: Any) -> Any:
    """Return a stage of mini-batches."""
    batch = hooked(lambda: torch.ones(3).exp(), "stage.mini-batch")

    def run(batches: int) -> str:
        for _ in range(batches):
            batch()
        return "done"

    return hooked(run, "stage", role="actor", stage="update_actor", mini_batches=True)


def metas(run: Runtime) -> list[dict[str, Any]]:
    finished(run)
    found = [json.loads(path.read_text()) for path in run.rundir.path.glob("*/*.meta.json")]
    return sorted(found, key=lambda meta: meta["step"])


@pytest.mark.fault("a trace would pass AUTOPROF_MAX_TRACE_MB", "goes on", "the rest of the trace; `truncated` and why")
@pytest.mark.parametrize("mode", ["discrete", "continuous"])
def test_a_capture_ends_early_and_says_so(
    joined: Any, update: Any, mocker: MockerFixture, caplog: Any, hooked: Any, mode: str
) -> None:
    run = joined(steps="2:5", mode=mode)
    trained = hooked(lambda number: update(4), "step.wrap", number="number")
    assert trained(2) == "done"
    writer.wait(10)
    (kind,) = artifacts._state.before
    # With this rate, the second recording is over its limit at the first check.
    artifacts._state.before[kind] = artifacts._Before(2, 10**15, 1.0)
    mocker.patch.object(artifacts, "_CHECK_S", 0)
    mocker.patch.object(artifacts, "_free", return_value=10**12)
    assert trained(3) == "done"
    writer.wait(10)
    assert run.hooks.errors == {}
    first, second = metas(run)
    assert first["state"] == "complete"
    reason = "the trace would pass 2,048 MB (AUTOPROF_MAX_TRACE_MB) at the 1,000,000,000 MB a second of step 2"
    assert (second["state"], second["reason"]) == ("truncated", reason)
    assert f"the capture ends early, {reason}" in caplog.text
    cluster.announce_step("run", None)


def test_a_trace_that_is_cut_when_it_is_written_says_so(joined: Any, update: Any, caplog: Any, hooked: Any) -> None:
    run = joined(steps="2", max_trace_mb=0.001)
    assert hooked(lambda number: update(4), "step.wrap", number="number")(2) == "done"
    writer.wait(10)
    assert [meta["state"] for meta in metas(run)] == ["truncated"]
    (said,) = [record.getMessage() for record in caplog.records if "cut short" in record.getMessage()]
    assert "AUTOPROF_MAX_TRACE_MB is 0.001; raise that" in said
    cluster.announce_step("run", None)


def test_what_there_is_no_room_for_is_not_recorded_and_is_no_error(
    joined: Any, update: Any, mocker: MockerFixture
) -> None:
    run = joined(steps="2")
    mocker.patch.object(artifacts, "_free", return_value=12 * MB)
    cluster.announce_step("run", cluster.StepAnnouncement(step=2, captured=True))
    assert update(2) == "done"
    cluster.announce_step("run", None)
    (meta,) = metas(run)
    assert meta["state"] == "failed"
    assert meta["reason"].startswith("not recorded: the disk has 12 MB free")
    assert run.hooks.errors == {}
    assert recorder.current() is None


@pytest.mark.fault("more steps than AUTOPROF_MAX_STEPS", "goes on", "the captures after them; said once")
def test_no_more_steps_are_captured_than_may_be(tmp_path: Path, caplog: Any) -> None:
    settings, run, chooser = Settings(steps="::2", max_steps=2), RunDir(tmp_path), Chooser()
    chosen = []
    for number in range(8):
        if number == 5:
            ask(run, Trigger())
        chooser.look(run, number)
        if chooser.choose(settings, number, number + 1) is not None:
            chosen.append(number)
    assert chosen == [0, 2]
    assert caplog.text.count("AUTOPROF_MAX_STEPS: ") == 1
    assert not chooser.any_after(settings, 7, 8)


def test_doctor_says_that_there_is_no_room(disk: Any, tmp_path: Path) -> None:
    report = Report(subject="environment")
    environment._check_folder(report, Settings(dir=str(tmp_path / "runs")))
    assert report.problems == []
    disk.free = 12
    environment._check_folder(report, Settings(dir=str(tmp_path / "runs")))
    (problem,) = report.problems
    assert problem.startswith(f"captures to {tmp_path}/runs are not recorded: the disk has 12 MB free")
