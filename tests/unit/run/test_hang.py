"""Steps that take too long: their limits, and the single request for the stacks of all processes."""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoprof.base import log
from autoprof.config import selection
from autoprof.run import watcher
from autoprof.run.journal import Span
from autoprof.run.runtime import Runtime
from autoprof.run.watcher import HangWatch, Limit, Watcher, hang_limits, usual_s, watched_span
from autoprof.rundir import layout
from autoprof.rundir.records import ProcessStacks, Why
from tests.support import helpers

Made = Callable[..., Runtime]
HOUR = 3600 * 10**9


def run_with(made: Made, when: str = "") -> Runtime:
    return made(when=selection.parse_conditions(when))


def begin(
    run: Runtime, kind: str = "step", name: str = "", step: int | None = 41, ago_ns: int = 0, **more: Any
) -> Span:
    span = Span(run.timeline, kind, name or kind, **({"step": step, "role": "trainer", "rank": 0} | more))
    span.begun_ns -= ago_ns
    if kind not in ("step", "stage", "window"):
        run.timeline.running.add(span)
    return span


def end(span: Span, *, took_s: float) -> None:
    span.end(at_ns=span.begun_ns + int(took_s * 1e9))


def folders(run: Runtime) -> list[str]:
    place = run.rundir.path / "hangs"
    return sorted(path.name for path in place.iterdir()) if place.exists() else []


def why(run: Runtime, name: str = "step_000041") -> Why:
    return layout.read_json(run.rundir.path / "hangs" / name / "why.json", Why)


@pytest.mark.parametrize(
    ("when", "took_s", "usual", "hangs"),
    [
        # The default: both limits, or the time alone while there is no median.
        ("", 1799.0, None, False),
        ("", 1801.0, None, True),
        ("", 1801.0, 300.0, True),
        ("", 1801.0, 400.0, False),
        ("", 1700.0, 1.0, False),
        ("step>2x", 1801.0, 300.0, True),
        # A condition of the user replaces it.
        ("hang>10m", 601.0, 500.0, True),
        ("hang>10m", 599.0, 1.0, False),
        ("hang>10m", 1801.0, 1800.0, True),
        ("hang>5x", 51.0, 10.0, True),
        ("hang>5x", 49.0, 10.0, False),
        ("hang>5x", 1e6, None, False),
        ("hang>1h,hang>5x", 51.0, 10.0, True),
        ("hang>1h,hang>5x", 3601.0, 1000.0, True),
        ("hang>1h,hang>5x", 3599.0, 1000.0, False),
        ("hang:off", 1e6, 1.0, False),
        ("hang>1s,hang:off", 1e6, 1.0, False),
    ],
)
def test_what_counts_as_hanging(when: str, took_s: float, usual: float | None, hangs: bool) -> None:
    found, _ = hang_limits(selection.parse_conditions(when))
    assert any(limit.passed(took_s, usual) for limit in found) is hangs


@given(took=st.floats(0, 1e5), usual=st.one_of(st.none(), st.floats(0, 1e5)), more=st.floats(0, 1e5))
def test_what_hangs_goes_on_hanging(took: float, usual: float | None, more: float) -> None:
    for limit in (Limit("", 1800.0, 5.0), Limit("", 600.0), Limit("", 0.0, 3.0)):
        assert not limit.passed(took, usual) or limit.passed(took + more, usual)


@pytest.mark.parametrize("works", [True, False])
def test_a_batch_of_a_server_that_is_never_idle_is_no_hang_while_the_server_works(made: Made, works: bool) -> None:
    run = run_with(made)
    begin(run, role="rollout", ago_ns=HOUR)
    outputs = itertools.count()
    run.timeline.watch_work((lambda: next(outputs)) if works else (lambda: None))
    watcher = Watcher(run)
    for _ in range(2):
        watcher.look()
    assert folders(run) == ([] if works else ["step_000041"])
    assert ('"moved":true' in run.rundir.process_file("journal").read_text()) is works


@pytest.mark.parametrize("serves", [True, False])
def test_a_server_without_requests_is_no_hang(made: Made, serves: bool) -> None:
    run = run_with(made, "hang>10m")
    begin(run).end()
    run.timeline.work = (lambda: None) if serves else None
    run.timeline._written = time.monotonic_ns() - HOUR
    journal_of = run.rundir.process_file("journal")
    os.utime(journal_of, (0, 0))
    HangWatch(run).look()
    assert folders(run) == ([] if serves else ["no_step"])


def test_a_step_that_takes_too_long_asks_all_processes_once(made: Made) -> None:
    run = run_with(made, "hang>10m")
    watcher = Watcher(run)
    step = begin(run, ago_ns=HOUR)
    for _ in range(3):
        watcher.look()
    assert folders(run) == ["step_000041"]
    found = why(run)
    assert (found.step, found.condition, found.pid, found.since_ns) == (41, "hang>10m", os.getpid(), step.line.start_ns)
    assert found.reason == "step 41 has taken 60 min 0 s"
    files = sorted(path.name for path in (run.rundir.path / "hangs" / "step_000041").iterdir())
    assert [name.partition("-")[2] for name in files] == [f"{os.getpid()}.json", ""]
    told = layout.read_json(run.rundir.path / "hangs" / "step_000041" / files[0], ProcessStacks)
    assert told.memory["resident"] > 0
    assert [span.name for span in told.spans] == ["step"]


def test_the_median_is_of_the_steps_that_ended_well(made: Made) -> None:
    run = run_with(made, "hang>5x")
    for took_s in (10, 10, 10_000):
        end(begin(run), took_s=took_s)
    for _ in range(9):
        begin(run).end(ValueError())
    begin(run, ago_ns=51 * 10**9)
    HangWatch(run).look()
    assert why(run).reason == "step 41 has taken 51.0 s, 5.1 times the median of 10.0 s"


@pytest.mark.parametrize("kind", ["stage", "request"])
def test_a_process_without_a_step_watches_its_oldest_stage_or_request(kind: str, made: Made) -> None:
    run = run_with(made, "hang>10m")
    begin(run, "sample", ago_ns=3 * HOUR)
    begin(run, "stage", "validate", ago_ns=2 * HOUR)
    begin(run, kind, "slow", step=7, ago_ns=HOUR)
    HangWatch(run).look()
    assert why(run, "step_000007").reason == f"{kind} slow of step 7 has taken 60 min 0 s"


def test_with_a_step_the_step_alone_counts(made: Made) -> None:
    run = run_with(made, "hang>10m")
    begin(run, "stage", "old", ago_ns=HOUR)
    begin(run)
    HangWatch(run).look()
    assert folders(run) == []
    # An earlier step that was left open is over.
    run.timeline.announced.clear()
    begin(run, step=1, ago_ns=HOUR)
    newer = begin(run, step=2)
    assert watched_span(run.timeline.open()) is newer


def test_what_belongs_to_no_step_has_a_folder_too(made: Made) -> None:
    run = run_with(made, "hang>10m")
    begin(run, "request", "generate", step=None, ago_ns=HOUR)
    HangWatch(run).look()
    assert why(run, "no_step").reason == "request generate has taken 60 min 0 s"


def test_what_belongs_to_no_step_is_left_to_the_trainer_first(made: Made) -> None:
    run = run_with(made, "hang>10m")
    begin(run, "request", "generate", step=None, ago_ns=10 * 60 * 10**9 + 20 * 10**9)
    HangWatch(run).look()
    assert folders(run) == []
    begin(run, step=4, ago_ns=HOUR)
    HangWatch(run).look()
    assert folders(run) == ["step_000004"]
    # A span of another process, much later: all processes have written their stacks since it began.
    run.timeline.announced.clear()
    begin(run, "request", "generate", step=None, ago_ns=HOUR)
    HangWatch(run).look()
    assert folders(run) == ["step_000004"]


@pytest.mark.parametrize(("when", "most"), [("hang>10m", 3), ("", 3)])
def test_all_processes_write_three_times_in_a_run_at_most(when: str, most: int, made: Made) -> None:
    run = run_with(made, when)
    for step in range(6):
        # This imitates another process of the run.
        watch = HangWatch(run)
        begin(run, step=step, ago_ns=HOUR)
        watch.look()
    assert folders(run) == [f"step_{step:06d}" for step in range(most)]


def test_a_table_says_how_often(made: Made, tmp_path: Path) -> None:
    run = made(when=(selection.condition_of({"what": "hang", "above": (10.0, "m"), "at_most": 1}),))
    for step in range(3):
        begin(run, step=step, ago_ns=HOUR)
        HangWatch(run).look()
    assert folders(run) == ["step_000000"]


def test_a_thousand_quick_steps_open_no_hang(made: Made) -> None:
    run = run_with(made, "hang>5m,hang>1000x")
    watch = HangWatch(run)
    for number in range(1000):
        step = begin(run, step=number)
        with_stage = begin(run, "stage", "update_actor", step=number)
        watch.look()
        end(with_stage, took_s=1)
        end(step, took_s=1)
    assert folders(run) == []
    assert usual_s(run.timeline.durations_ns, "step", "step") == 1.0
    assert len(run.timeline.durations_ns["stage", "update_actor"]) == 100


def test_of_processes_that_find_it_at_once_one_says_why(made: Made) -> None:
    run = run_with(made, "hang>10m")
    begin(run, ago_ns=HOUR)
    watches = [HangWatch(run) for _ in range(8)]
    barrier = threading.Barrier(len(watches))
    failed = []

    def look(watch: HangWatch) -> None:
        barrier.wait()
        try:
            watch.look()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=look, args=(watch,)) for watch in watches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert folders(run) == ["step_000041"]
    assert [path.name for path in (run.rundir.path / "hangs" / "step_000041").iterdir()] == ["why.json"]


@pytest.mark.fault("the disk is full as a step hangs", "goes on", "where the processes stand")
def test_on_a_full_disk_nothing_is_left(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("warning")
    run = run_with(made, "hang>10m")
    begin(run, ago_ns=HOUR)
    watcher = Watcher(run)
    with helpers.room_for(0):
        watcher.look()
        watcher.look()
    place = run.rundir.path / "hangs"
    assert list(place.iterdir()) == []
    assert capsys.readouterr().err.count("can't write to") == 1


def test_a_run_directory_that_cannot_be_written_is_said_once(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("warning")
    run = run_with(made, "hang>10m")
    run.rundir.path.mkdir()
    begin(run, ago_ns=HOUR)
    # Root may write anywhere, but cannot make a folder where a file exists.
    (run.rundir.path / "hangs").write_text("")
    watcher = Watcher(run)
    watcher.look()
    watcher.look()
    assert (run.rundir.path / "hangs").read_text() == ""
    assert capsys.readouterr().err.count(f"autoprof: can't write to {run.rundir.path}: ") == 1


def test_the_process_that_started_the_run_says_so_in_one_line(
    made: Made, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log.configure("warning")
    run = run_with(made, "hang>10m")
    other = HangWatch(run)
    monkeypatch.setattr(Runtime, "speaks", True)
    speaker = HangWatch(run)
    step = begin(run, ago_ns=HOUR)
    monkeypatch.setattr(Runtime, "speaks", False)
    other.look()
    assert capsys.readouterr().err == ""
    step.drop()
    known = list(threading.enumerate())
    monkeypatch.setattr(Runtime, "speaks", True)
    for _ in range(2):
        speaker.look()
    folder = run.rundir.path / "hangs" / "step_000041"
    assert capsys.readouterr().err == (
        f"autoprof: step 41 has taken 60 min 0 s; stacks are in {folder}; "
        f"autoprof doctor {run.rundir.path} shows which process is late\n"
    )
    assert threading.enumerate() == known


def test_switched_off_nothing_is_looked_at(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_with(made, "hang:off")
    begin(run, ago_ns=HOUR)
    watch = HangWatch(run)
    monkeypatch.setattr(watcher, "watched_span", None)
    watch.look()
    assert folders(run) == []
    assert not run.settings.compares


def test_a_real_process_whose_step_hangs_says_where_and_goes_on(tmp_path: Path, go: helpers.Python) -> None:
    code = """
from pathlib import Path

def fetch_score():
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline and not list(Path("autoprof_runs").glob("*/hangs/step_000002/*-[0-9]*.json")):
        time.sleep(0.1)

Trainer().fit(fetch_score)
print("threads", threading.active_count())
"""
    done = go(code, AUTOPROF_LOOK_MS="200", AUTOPROF_STEPS="", AUTOPROF_WHEN="hang>1s")
    (folder,) = tmp_path.glob("autoprof_runs/2*/hangs/*")
    (path,) = folder.glob("*-[0-9]*.json")
    told = layout.read_json(path, ProcessStacks)
    assert "fetch_score" in [frame.function.rpartition(".")[2] for frame in told.threads[0].frames]
    assert [span.name for span in told.spans] == ["step", "update_actor"]
    assert told.flight_record == ""
    assert done.stdout == "threads 1\n"
    assert done.stderr.count("autoprof doctor") == 1
    assert json.loads((folder.parent.parent / "run.json").read_text())["state"] == "ended"
    assert layout.read_json(folder / "why.json", Why).unix_ns < time.time_ns()
