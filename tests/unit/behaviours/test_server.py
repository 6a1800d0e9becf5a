"""Batches and windows of a server, with an engine that records its requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pytest_mock import MockerFixture

from autoprof.behaviours import serving
from autoprof.behaviours.rollout import Request
from autoprof.config.settings import Settings
from autoprof.run import end, runtime
from autoprof.rundir.layout import RunDir
from autoprof.windows import requests


class Engine:
    """An engine that records starts, by their step, and stops, and runs a function of the test meanwhile."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.meanwhile: Callable[[], Awaitable[None]] | None = None
        self.problem = ""
        self.server = serving.ServedEngine(self, Engine.start, Engine.stop)

    async def start(self, request: Request) -> dict[str, Any]:
        if self.meanwhile is not None:
            await self.meanwhile()
        self.log.append(request.step)
        return {"problem": self.problem}

    async def stop(self, cut: str) -> dict[str, Any]:
        self.log.append(cut or "stop")
        return {"problem": ""}


@pytest.fixture
def run(mocker: MockerFixture, tmp_path: Path) -> Any:
    made = SimpleNamespace(settings=Settings(steps="2,3"), rundir=RunDir(tmp_path))
    made.timeline = SimpleNamespace(listener=None, watch_work=lambda work: None)
    mocker.patch.object(runtime, "current", return_value=made)
    mocker.patch.object(serving, "Span")
    mocker.patch.object(end, "window_passed")
    return made


@pytest.fixture
def engine() -> Engine:
    return Engine()


async def batch(engine: Engine, run: Any) -> None:
    await engine.server.request(run)
    engine.server.idle()
    await settled(engine)


async def settled(engine: Engine) -> None:
    """Wait for the server's tasks."""
    while engine.server._tasks:
        await asyncio.gather(*engine.server._tasks)
        await asyncio.sleep(0)  # from Python 3.12 on there is no turn of the loop where all are done


async def test_the_chosen_batches_are_recorded_and_the_command_is_run_after_the_last(run: Any, engine: Engine) -> None:
    for count in range(1, 5):
        assert end.window_passed.call_count == (count == 4)  # type: ignore[attr-defined]
        await batch(engine, run)
    assert engine.log == [2, "stop", 3, "stop"]


async def test_a_trigger_counts_batches(run: Any, engine: Engine) -> None:
    run.settings = Settings(steps="")
    await batch(engine, run)
    requests.ask(run.rundir, requests.Trigger(steps=2))
    for _ in range(3):
        await batch(engine, run)
    assert engine.log == [2, "stop", 3, "stop"]
    assert [(each.state, each.captured) for each in requests.states(run.rundir).values()] == [("done", [2, 3])]


async def test_an_engine_led_by_a_trainer_refuses_triggers_with_the_reason(run: Any, engine: Engine) -> None:
    engine.server.follow()
    requests.ask(run.rundir, requests.Trigger())
    await batch(engine, run)
    assert engine.log == []
    assert [(each.state, each.reason) for each in requests.states(run.rundir).values()] == [
        ("done", "a trainer decides what this server records; use autoprof trigger on the trainer's run")
    ]


async def test_an_engine_that_a_trainer_of_its_run_leads_counts_no_steps_and_takes_no_triggers(
    run: Any, engine: Engine
) -> None:
    engine.server.follow(same_run=True)
    requests.ask(run.rundir, requests.Trigger())
    for _ in range(3):
        await batch(engine, run)
    assert await engine.server.open_window(request=Request(action="start", step=7)) == ""
    assert await engine.server.close_window() == ""
    assert engine.log == [7, "stop"]
    span = serving.Span.return_value  # type: ignore[attr-defined]
    assert (span.drop.call_count, span.end.call_count) == (3, 0)
    assert end.window_passed.call_count == 0  # type: ignore[attr-defined]
    assert requests.states(run.rundir) == {}


async def test_requests_of_a_batch_wait_until_it_is_recorded(run: Any, engine: Engine) -> None:
    await batch(engine, run)
    started = asyncio.Event()
    engine.meanwhile = started.wait  # type: ignore[assignment]
    waiting = [asyncio.create_task(engine.server.request(run)) for _ in range(3)]
    for _ in range(10):
        await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    # A late output of the previous batch.
    engine.server.idle()
    started.set()
    await asyncio.gather(*waiting)
    await settled(engine)
    assert engine.log == [2]


async def test_a_request_that_is_given_up_leaves_no_engine_half_started(run: Any, engine: Engine) -> None:
    await batch(engine, run)
    started = asyncio.Event()
    engine.meanwhile = started.wait  # type: ignore[assignment]
    given_up = asyncio.create_task(engine.server.request(run))
    while not engine.server._lock.locked():
        await asyncio.sleep(0)
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    started.set()
    await settled(engine)
    engine.server.idle()
    await settled(engine)
    assert engine.log == [2, "stop"]


async def test_a_request_that_follows_at_once_is_in_the_next_batch(run: Any, engine: Engine) -> None:
    for _ in range(3):
        await engine.server.request(run)
        engine.server.idle()
    await settled(engine)
    assert engine.log == [2, "stop", 3, "stop"]


async def test_a_window_is_named_after_the_open_or_the_next_batch(run: Any, engine: Engine) -> None:
    assert await engine.server.open_window() == ""
    assert await engine.server.close_window() == ""
    await engine.server.request(run)
    assert await engine.server.open_window() == ""
    engine.server.idle()
    # A window stays open over batches, and no batch is recorded in it.
    await batch(engine, run)
    assert await engine.server.close_window() == ""
    assert await engine.server.open_window(77) == ""
    assert await engine.server.close_window() == ""
    assert engine.log == [1, "stop", 1, "stop", 77, "stop"]


async def test_windows_out_of_order_are_refused(run: Any, engine: Engine) -> None:
    server = engine.server
    assert await server.close_window() == "no window is open"
    assert await server.open_window(5) == ""
    assert await server.open_window(6) == "a window is open already"
    assert await server.close_window() == ""
    await batch(engine, run)
    await server.request(run)
    assert await server.open_window(7) == "a window is open already"
    await settled(engine)
    assert engine.log == [5, "stop", 2]


async def test_a_window_closes_by_itself_and_a_late_timer_closes_no_other(run: Any, engine: Engine) -> None:
    server = engine.server
    assert await server.open_window(5, 0.001) == ""
    while engine.log[-1] != "stop":
        await asyncio.sleep(0)
    await settled(engine)
    assert await server.close_window() == "no window is open"
    assert await server.open_window(6, 600) == ""
    first = server._window
    assert await server.close_window() == ""
    assert await server.open_window(7) == ""
    assert await server._close_window(first) == "no window is open"
    assert await server.close_window() == ""
    assert engine.log == [5, "stop", 6, "stop", 7, "stop"]


def test_an_engine_that_can_not_be_recorded_continues(run: Any) -> None:
    async def broken() -> None:
        raise OSError("gone")

    async def drive(engine: Engine) -> None:
        engine.meanwhile = broken
        assert await engine.server.open_window() == "OSError: gone"
        await batch(engine, run)
        await batch(engine, run)
        engine.meanwhile, engine.problem = None, "busy"
        await batch(engine, run)
        assert await engine.server.open_window() == "busy"

    asyncio.run(drive(engine := Engine()))
    assert engine.log == [3, 4]


async def test_another_caller_of_the_profiler_ends_the_recording_and_is_not_stopped(run: Any, engine: Engine) -> None:
    assert await engine.server.open_window(5, 600) == ""
    await engine.server.give_way()
    await settled(engine)
    assert await engine.server.close_window() == "no window is open"
    await batch(engine, run)
    await engine.server.request(run)
    await engine.server.give_way()
    engine.server.idle()
    await settled(engine)
    cut = "another caller started the engine's profiler"
    assert engine.log == [5, cut, 2, cut]


@pytest.mark.parametrize(
    ("body", "step", "duration_s"),
    [
        (b"", None, None),
        (b" {} ", None, None),
        (b'{"global_step": 0}', 0, None),
        (b'{"global_step": 7, "duration_s": 1.5, "more": 1}', 7, 1.5),
        (b'{"global_step": null, "duration_s": 3}', None, 3),
    ],
)
def test_bodies(body: bytes, step: int | None, duration_s: float | None) -> None:
    assert serving.window_of(body) == (step, duration_s)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"global_step": -1}', "global_step: got -1; it takes a whole number from 0"),
        (b'{"global_step": true}', "global_step: got True; it takes a whole number from 0"),
        (b'{"global_step": 1.5}', "global_step: got 1.5; it takes a whole number from 0"),
        (b'{"duration_s": 0}', "duration_s: got 0; it takes seconds, above 0 and below 1e9"),
        (b'{"duration_s": "5"}', "duration_s: got '5'; it takes seconds, above 0 and below 1e9"),
        (b'{"duration_s": NaN}', "duration_s: got nan; it takes seconds, above 0 and below 1e9"),
        (b'{"duration_s": 1000000000}', "duration_s: got 1000000000; it takes seconds, above 0 and below 1e9"),
        (b'{"duration_s": Infinity}', "duration_s: got inf; it takes seconds, above 0 and below 1e9"),
        (b"[" * 100_000, f"body: got {'[' * 100!r}; it takes an object in JSON, or nothing"),
        (b"\xff", "body: got '\ufffd'; it takes an object in JSON, or nothing"),
        (b"null", "body: got 'null'; it takes an object in JSON, or nothing"),
    ],
)
def test_wrong_bodies_are_named(body: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=r"it takes") as caught:
        serving.window_of(body)
    assert str(caught.value) == said


async def test_batches_of_a_server_that_a_trainer_leads_are_not_chosen_by_their_numbers(
    run: Any, engine: Engine
) -> None:
    async def asked(**body: Any) -> tuple[int, dict[str, str]]:
        return await serving.answer_trainer(engine.server, json.dumps(body).encode())

    assert await asked(action="stop") == (409, {"problem": "no window is open"})
    assert await asked(action="lead") == (200, {"problem": "", "run": str(run.rundir.path)})
    await batch(engine, run)
    await batch(engine, run)
    assert await asked(action="start", global_step=40) == (200, {"problem": "", "run": str(run.rundir.path)})
    await batch(engine, run)
    assert await asked(action="start", global_step=41) == (
        409,
        {"problem": "a window is open already", "run": str(run.rundir.path)},
    )
    assert await asked(action="stop") == (200, {"problem": ""})
    assert await asked(action="start", global_step=-1) == (
        400,
        {"problem": "Expected `int` >= 0 - at `$.global_step`"},
    )
    assert await asked(action="end") == (400, {"problem": "Invalid enum value 'end' - at `$.action`"})
    assert engine.log == [40, "stop"]
