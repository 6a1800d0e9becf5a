"""Samples of the stack of the thread that runs the steps, while no stage is open."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from autoprof.report.model import StepRow
from autoprof.run import gaps
from autoprof.run.gaps import GapSampler, step_without_stage
from autoprof.run.journal import Span
from autoprof.run.runtime import Runtime
from autoprof.run.watcher import Watcher
from autoprof.rundir.records import LOCK_HELD
from tests.support import helpers
from tests.support.timelines import figures

Made = Callable[..., Runtime]


def begin(run: Runtime, kind: str, name: str = "", role: str = "trainer") -> Span:
    span = Span(run.timeline, kind, name or kind, step=1, role=role, rank=0)
    if kind not in ("step", "stage"):
        run.timeline.running.add(span)
    return span


@pytest.fixture
def run(made: Made) -> Runtime:
    return made()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list with the milliseconds that the sampler's clock is ahead."""
    ahead, now = [0], gaps.time.monotonic_ns
    monkeypatch.setattr(gaps.time, "monotonic_ns", lambda: now() + ahead[0] * 10**6)
    monkeypatch.setattr(gaps, "_switches", lambda: 0)
    return ahead


def lines(run: Runtime, sampler: GapSampler) -> list[dict[str, Any]]:
    sampler.write()
    texts = "".join(path.read_text() for path in run.rundir.path.glob("journal/*")).splitlines()
    return [line for line in map(json.loads, texts) if line["kind"] == "stacks"]


@pytest.mark.parametrize(
    ("opened", "is_gap"),
    [
        ([], False),
        ([("stage", "gen", "actor")], False),
        ([("step", "step", "trainer")], True),
        ([("step", "batch", "rollout")], False),
        ([("step", "step", "trainer"), ("stage", "gen", "actor")], False),
        ([("step", "step", "trainer"), ("timer", "gen", "trainer")], False),
        # verl's timer around the whole step, and the samples of an asynchronous trainer.
        ([("step", "step", "trainer"), ("timer", "step", "trainer"), ("sample", "agent", "agent_loop")], True),
    ],
)
def test_only_a_step_of_a_trainer_without_a_stage_is_sampled(
    run: Runtime, clock: list[int], opened: list[tuple[str, str, str]], is_gap: bool
) -> None:
    kept = [begin(run, *each) for each in opened]
    sampler = GapSampler(run.timeline, lambda: None)
    sampler.look()
    clock[0] = 200
    sampler.look()
    assert (step_without_stage(run.timeline) is not None, bool(lines(run, sampler))) == (is_gap, is_gap)
    assert len(kept) == len(opened)


def test_the_interval_grows_with_the_age_and_equal_stacks_are_one_period(run: Runtime, clock: list[int]) -> None:
    step = begin(run, "step")
    sampler = GapSampler(run.timeline, lambda: None)
    waits = []
    for _ in range(90):
        waits.append(sampler.look() or 0.0)
        clock[0] += round(waits[-1] * 1000) + 1
    assert waits[0] == pytest.approx(0.1, abs=0.05)
    assert max(waits) == pytest.approx(1.0, abs=0.3)
    step.end()
    for line in lines(run, sampler):
        assert len(line["periods"]) == len(line["stacks"]) == 1


def test_the_last_sample_of_a_process_stands_for_the_time_until_its_end(run: Runtime, clock: list[int]) -> None:
    step = begin(run, "step")
    sampler = GapSampler(run.timeline, lambda: None)
    sampler.look()
    clock[0] = 200
    sampler.look()
    clock[0] = 280
    step.end()
    sampler.finish()
    ((_, end_ms, _),) = lines(run, sampler)[0]["periods"]
    assert end_ms == pytest.approx(280, abs=30)


def test_an_unusual_gap_is_written_each_time_its_age_has_doubled(run: Runtime, clock: list[int]) -> None:
    sampler = GapSampler(run.timeline, lambda: None)

    def written(gap_ms: int) -> int:
        before, step, end = sampler._lines, begin(run, "step"), clock[0] + gap_ms
        while clock[0] < end:
            sampler.look()
            clock[0] += 100
        step.end()
        sampler.look()
        return sampler._lines - before

    # Gaps of the same length are usual.
    assert [written(5000) for _ in range(2)] == [3, 0]
    assert written(30_000) >= 3


@pytest.mark.parametrize("held", [True, False])
def test_a_late_sample_stands_only_for_the_lock_if_that_is_known(
    run: Runtime, clock: list[int], monkeypatch: pytest.MonkeyPatch, held: bool
) -> None:
    begin(run, "step")
    sampler = GapSampler(run.timeline, lambda: None)
    sampler.look()
    clock[0] = 3000
    monkeypatch.setattr(gaps, "_switches", lambda: 500 if held else 3)
    sampler.look()
    (line,) = lines(run, sampler)
    assert [index for _, _, index in line["periods"]] == ([LOCK_HELD, 0] if held else [0])
    assert line["periods"][-1][0] == line["periods"][-1][1]


def test_a_gap_wakes_the_watcher_at_once_and_an_open_stage_never(run: Runtime, clock: list[int]) -> None:
    woken: list[int] = []
    sampler = GapSampler(run.timeline, lambda: woken.append(1))
    assert sampler.look() is None
    step, outer, inner = begin(run, "step"), begin(run, "stage"), begin(run, "stage")
    assert len(woken) == 1
    assert sampler.look() is not None
    clock[0] += 200
    assert sampler.look() is None
    inner.end()
    assert len(woken) == 1
    outer.end()
    assert len(woken) == 2
    step.end()
    clock[0] += 200
    assert sampler.look() is None


def test_a_coroutine_is_found_where_it_waits(run: Runtime, clock: list[int]) -> None:
    sampler = GapSampler(run.timeline, lambda: None)

    async def waits_for_samples(event: asyncio.Event) -> None:
        await event.wait()

    async def step() -> None:
        event = asyncio.Event()
        span = begin(run, "step")
        loop = asyncio.get_running_loop()

        def sample() -> None:
            while sys._current_frames()[span.thread].f_code.co_name != "select":
                time.sleep(0.001)
            sampler.look()
            clock[0] += 200
            sampler.look()
            loop.call_soon_threadsafe(event.set)

        sampled = loop.run_in_executor(None, sample)
        await waits_for_samples(event)
        span.end()
        await sampled

    asyncio.run(step())
    (line,) = lines(run, sampler)
    names = [line["frames"][index]["function"].rpartition(".")[2] for index in line["stacks"][0]]
    assert names[:2] == ["step", "waits_for_samples"]


def deep(depth: int, then: Callable[[], None]) -> None:
    if depth:
        deep(depth - 1, then)
    else:
        then()


def test_lines_are_bounded(run: Runtime, clock: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    begin(run, "step")
    sampler = GapSampler(run.timeline, lambda: None)
    for depth in range(40):
        deep(3 * depth, lambda: sampler.look() and None)
        clock[0] += 400
    written = lines(run, sampler)
    assert max(len(line["stacks"]) for line in written) <= 17
    assert max(len(stack) for line in written for stack in line["stacks"]) <= 24
    monkeypatch.setattr(gaps, "_MAX_LINES", len(written))
    clock[0] += 60_000
    assert sampler.look() is None
    assert len(lines(run, sampler)) == len(written)


def test_a_setting_switches_it_off(made: Made) -> None:
    assert Watcher(made(gap_stacks=False)).sample() == float("inf")
    run = made()
    begin(run, "step")
    assert Watcher(run).sample() < 1


PROGRAM = """
import ctypes, gc, os, queue, threading, time
import autoprof

def sleeps(): time.sleep(0.8)
def imports(): import slow_module
def waits():
    items = queue.Queue()
    threading.Timer(0.8, items.put, [1]).start()
    items.get()
def locks():
    lock = threading.Lock()
    lock.acquire()
    threading.Timer(0.8, lock.release).start()
    with lock:
        pass
def reads():
    threading.Thread(target=lambda: (time.sleep(0.8), open("pipe", "w").close())).start()
    open("pipe").read()
def collects():
    until = time.monotonic() + 0.8
    while time.monotonic() < until: gc.collect()
def holds(): ctypes.PyDLL(None).usleep(1_200_000)

os.mkfifo("pipe")
for number, work in enumerate([imports, sleeps, waits, locks, reads, collects, holds], 1):
    with autoprof.step(number):
        with autoprof.stage("rollout"):
            time.sleep(0.05)
        work()
        if number == 6 and os.fork() == 0:
            os._exit(0)
        with autoprof.stage("update_actor"):
            time.sleep(0.05)
assert [thread.name for thread in threading.enumerate()] == ["MainThread"]
"""


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[StepRow]:
    folder = tmp_path_factory.mktemp("gaps")
    (folder / "slow_module.py").write_text("import time\ntime.sleep(1.2)\n")
    (folder / "train.py").write_text(PROGRAM)
    result = helpers.run([sys.executable, "train.py"], cwd=folder, AUTOPROF="1", AUTOPROF_STEPS="")
    assert (result.returncode, result.stderr) == (0, "")
    return figures((folder / "autoprof_runs" / "latest").resolve()).steps


@pytest.mark.parametrize(
    ("step", "place"),
    [
        (1, "in import slow_module at train.py:6 imports"),
        (2, "at train.py:5 sleeps"),
        (3, "in queue.get at train.py:10 waits"),
        (4, "at train.py:15 locks"),
        (5, "at train.py:19 reads"),
        (6, "at train.py:22 collects"),
        (7, "without a sample, because the interpreter's lock was held; then it was at train.py:23 holds"),
    ],
)
def test_the_cause_of_a_gap_is_named_with_its_seconds(rows: list[StepRow], step: int, place: str) -> None:
    gap = rows[step - 1].no_stage
    assert gap is not None
    assert gap.places[0].place == place
    # On a busy machine, samples may come late.
    assert gap.seconds / 2 < gap.places[0].seconds <= gap.seconds * 1.01
