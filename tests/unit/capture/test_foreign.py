"""Profilers and profile functions of the program: autoprof's recordings give way to them."""

from __future__ import annotations

import cProfile
import json
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from autoprof.capture import recorder
from tests.support import captures, helpers
from tests.support.captures import SUBJECT, captured, finished, work

# Profilers that a program may start; True if one in another thread than autoprof's is not in the way.
KINDS = {
    "profile": ("torch.profiler.profile(activities=CPU)", False),
    "warm-up": ("torch.profiler.profile(activities=CPU, schedule=schedule(wait=0, warmup=1, active=9))", False),
    "all threads": ("torch.profiler.profile(experimental_config=_ExperimentalConfig(profile_all_threads=True))", False),
    "low level": ("Entered(activities=CPU)", False),
    "autograd": ("torch.autograd.profiler.profile()", False),
    "emit_itt": ("torch.autograd.profiler.emit_itt()", True),
    "legacy": ("torch.autograd.profiler_legacy.profile()", True),
}

PROGRAM = (
    captures.PROGRAM
    + """
import json, sys, threading, warnings
from torch._C._profiler import _ExperimentalConfig
from torch.autograd import profiler_legacy
from torch.profiler import ProfilerActivity, schedule
from torch.profiler.profiler import _KinetoProfile

warnings.simplefilter("ignore")
CPU = [ProfilerActivity.CPU]
recorder.watch_others()


class Entered(_KinetoProfile):
    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *raised):
        self.stop()


def begin():
    return recorder.begin(run, subject)


def work(profiler):
    torch.ones(8, 8).mm(torch.ones(8, 8))
    if hasattr(profiler, "step"):
        profiler.step()


def seen(profiler):
    if hasattr(profiler, "key_averages"):
        return sum(event.count for event in profiler.key_averages() if event.key == "aten::mm")


def stage():
    recording = begin()
    if recording is not None:
        torch.ones(1)
        recording.stop()
    return recording is not None


def here(function):
    return function()


def in_thread(function):
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def before(make, run_stage):
    # The program's profiler is on when a stage begins and when it ends.
    with make() as profiler:
        work(profiler)
        captured = run_stage(stage)
        work(profiler)
    return captured, seen(profiler)


def inside(make, run_users):
    # The program's profiler starts and ends in a stage.
    def users():
        with make() as profiler:
            work(profiler)
            captured = (recorder.current() is not None)
            work(profiler)
        return captured, seen(profiler)

    recording = begin()
    result = run_users(users)
    recording.stop()
    return result


def across(make, _):
    # The program's profiler starts in another thread during a stage, and outlives it.
    started, ended, results = threading.Event(), threading.Event(), []

    def users():
        started.set()
        with make() as profiler:
            work(profiler)
            captured = (recorder.current() is not None)
            ended.wait(60)
            work(profiler)
        results.append((captured, seen(profiler)))

    recording = begin()
    user = threading.Thread(target=users)
    user.start()
    started.wait(60)
    torch.ones(1)
    recording.stop()
    ended.set()
    user.join()
    return results[0]


outcomes = {}
for kind, (made, one_thread) in json.loads(sys.argv[1]).items():
    make = eval(f"lambda: {made}")
    places = [(before, here), (before, in_thread), (inside, here)]
    places.append((inside, in_thread) if one_thread else (across, None))
    outcomes[kind] = [order(make, where) for order, where in places]
    outcomes[kind].append(stage())
print(json.dumps(outcomes))
"""
)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run the program. Return, by kind, if autoprof recorded beside each profiler, and what the profiler saw."""
    command = [sys.executable, "-c", PROGRAM, json.dumps(KINDS)]
    result = helpers.run(command, cwd=tmp_path_factory.mktemp("foreign"), AUTOPROF="1", AUTOPROF_RUN_ID="run")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_profiler_of_the_program_sees_all_that_it_sees_without_autoprof(kind: str, outcomes: dict[str, Any]) -> None:
    counts = [count for _, count in outcomes[kind][:-1]]
    assert counts == [{"warm-up": 1, "emit_itt": None}.get(kind, 2)] * 4


@pytest.mark.parametrize("kind", KINDS)
def test_autoprof_records_beside_a_profiler_only_if_both_can_be_on(kind: str, outcomes: dict[str, Any]) -> None:
    before, before_in_thread, inside, other = (captured for captured, _ in outcomes[kind][:-1])
    one_thread = KINDS[kind][1]
    assert (before, before_in_thread, inside, other) == (False, one_thread, False, one_thread)


@pytest.mark.parametrize("kind", KINDS)
def test_autoprof_records_again_after_a_profiler_of_the_program(kind: str, outcomes: dict[str, Any]) -> None:
    assert outcomes[kind][-1]


FROZEN = (
    captures.PROGRAM
    + """
recorder.watch_others()
readings = []


def frozen():
    readings.append(1)
    return 0


def read(profiled):
    readings.clear()
    profiled()
    return len(readings)


def captured():
    recorder.begin(run, subject).stop()


def own():
    with torch.profiler.profile():
        torch.ones(1)


captured()
torch.autograd.profiler.perf_counter_ns = frozen
own_before = read(own)
print(read(captured), own_before > 0, read(own) == own_before, read(captured))
"""
)


def test_a_frozen_clock_of_torchs_module_is_read_for_the_program_alone(python: Any) -> None:
    result = python(FROZEN, AUTOPROF="1", AUTOPROF_RUN_ID="run")
    assert result.stdout == "0 True True 0\n"


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
