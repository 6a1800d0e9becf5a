"""Profilers of the program: autoprof does not start beside one, and ends its own before one starts."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tests.support import captures, helpers

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
