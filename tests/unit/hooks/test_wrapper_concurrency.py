"""Wrapped functions that are cancelled, closed, recursive, called concurrently, or get a thrown exception."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from pytest_mock import MockerFixture

from autoprof.hooks import registry
from autoprof.hooks.behaviour import CALL, Around, Behaviour, Call
from autoprof.hooks.dispatch import InThread
from autoprof.hooks.wrapper import wrap
from tests.support.misbehaving import BEHAVIOURS, NAMES, SCRIPTS, Scripted, nothing, waits

Behave = Callable[[Scripted], None]
AWAITS = 3
EACH = pytest.mark.parametrize("behaviour", BEHAVIOURS, ids=NAMES)


def user(notes: list[str], last_word: bool = False) -> Callable[[], Any]:
    """A coroutine function that notes how far it comes; with `last_word` it awaits once more when it is cancelled."""

    async def work() -> str:
        notes.append("begins")
        try:
            for turn in range(AWAITS):
                await asyncio.sleep(0)
                notes.append(f"turn {turn}")
        except BaseException as error:
            notes.append(type(error).__name__)
            if last_word:
                await asyncio.sleep(0)
            raise
        finally:
            notes.append("ends")
        return "result"

    return work


def cancelled(function: Callable[[], Any], turns: int) -> tuple[str, int]:
    """Cancel a task after a number of turns of the event loop. Return how it ended, and the turns that it took."""

    async def main() -> tuple[str, int]:
        task = asyncio.ensure_future(function())
        taken = 0
        while not task.done():
            if taken == turns:
                task.cancel()
            await asyncio.sleep(0)
            taken += 1
        return "cancelled" if task.cancelled() else task.result(), taken

    return asyncio.run(main())


@EACH
@pytest.mark.parametrize("last_word", [False, True])
@pytest.mark.parametrize("turns", range(12))
def test_a_task_that_is_cancelled(behave: Behave, behaviour: Scripted, last_word: bool, turns: int) -> None:
    behave(behaviour)
    notes: list[str] = []
    state, _ = cancelled(wrap(user(notes, last_word), "k"), turns)
    assert notes.count("begins") == notes.count("ends") <= 1
    whole = ["begins", *(f"turn {turn}" for turn in range(AWAITS)), "ends"]
    if state == "result":
        assert notes == whole
    elif "CancelledError" in notes:
        assert notes == [*whole[: len(notes) - 2], "CancelledError", "ends"]
    else:  # it was cancelled while autoprof waited, before the function or after it
        assert notes in ([], whole)


@pytest.mark.parametrize("turns", range(12))
def test_a_hook_that_does_nothing_takes_no_turn_of_the_event_loop(behave: Behave, turns: int) -> None:
    behave(Scripted(script=nothing))
    bare: list[str] = []
    wrapped: list[str] = []
    assert cancelled(wrap(user(wrapped), "k"), turns) == cancelled(user(bare), turns)
    assert wrapped == bare


@EACH
@pytest.mark.parametrize("turns", range(8))
def test_a_coroutine_that_is_closed(behave: Behave, behaviour: Scripted, turns: int) -> None:
    behave(behaviour)
    notes: list[str] = []
    coroutine = wrap(user(notes), "k")()
    try:
        for _ in range(turns):
            coroutine.send(None)
    except StopIteration:
        pass
    coroutine.close()
    assert notes.count("begins") == notes.count("ends") <= 1


@pytest.mark.filterwarnings("error")
def test_an_abandoned_coroutine_prints_nothing(behave: Behave) -> None:
    behave(Scripted(script=waits))
    notes: list[str] = []
    coroutine = wrap(user(notes), "k")()
    for _ in range(3):
        coroutine.send(None)
    del coroutine
    gc.collect()
    assert notes == ["begins", "turn 0", "GeneratorExit", "ends"]


@pytest.mark.parametrize("turns", range(1, AWAITS + 1))
def test_an_exception_thrown_into_a_coroutine_reaches_the_function(behave: Behave, turns: int) -> None:
    behave(Scripted(script=nothing))
    notes: list[str] = []
    coroutine = wrap(user(notes), "k")()
    for _ in range(turns):
        coroutine.send(None)
    error = KeyError("thrown")
    with pytest.raises(KeyError) as caught:
        coroutine.throw(error)
    assert caught.value is error
    assert notes[-2:] == ["KeyError", "ends"]


@EACH
def test_a_function_that_calls_itself(behave: Behave, behaviour: Scripted) -> None:
    behave(behaviour)
    calls: list[int] = []

    def down(depth: int) -> int:
        calls.append(depth)
        return depth + (wrapped(depth - 1) if depth else 0)

    async def adown(depth: int) -> int:
        calls.append(depth)
        return depth + (await awrapped(depth - 1) if depth else 0)

    wrapped, awrapped = wrap(down, "k"), wrap(wrap(adown, "k"), "k")
    assert wrapped(20) == 210
    assert asyncio.run(awrapped(20)) == 210
    assert calls == [*range(20, -1, -1)] * 2


def test_many_threads_at_once(mocker: MockerFixture) -> None:
    behaviours = {f"k{number}": behaviour for number, behaviour in enumerate(BEHAVIOURS)}
    mocker.patch.object(registry, "active", side_effect=lambda key: (None, behaviours[key]))
    calls: list[tuple[str, int]] = []
    together = threading.Barrier(8)

    def work(key: str, value: int) -> tuple[str, int]:
        calls.append((key, value))
        if value % 3 == 0:
            raise KeyError(key, value)
        return key, value

    def thread(number: int) -> None:
        together.wait()
        for value in range(40):
            for key in behaviours:
                try:
                    assert wrap(work, key)(key, 100 * number + value) == (key, 100 * number + value)
                except KeyError as error:
                    assert error.args == (key, 100 * number + value)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(thread, range(8)))
    expected = [(key, 100 * number + value) for key in behaviours for number in range(8) for value in range(40)]
    assert sorted(calls) == sorted(expected)


def test_many_tasks_at_once(mocker: MockerFixture) -> None:
    behaviours = {script.__name__: behaviour for script, behaviour in zip(SCRIPTS, BEHAVIOURS, strict=False)}
    mocker.patch.object(registry, "active", side_effect=lambda key: (None, behaviours[key]))
    context: contextvars.ContextVar[int] = contextvars.ContextVar("context")
    calls: list[int] = []

    async def work(value: int) -> int:
        calls.append(value)
        await asyncio.sleep(0)
        token = context.set(value)
        await asyncio.sleep(0.001 * (value % 5))
        assert context.get() == value
        context.reset(token)
        if value % 3 == 0:
            raise KeyError(value)
        return value

    async def main() -> list[Any]:
        keys = list(behaviours)
        tasks = [wrap(work, keys[value % len(keys)])(value) for value in range(400)]
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = asyncio.run(main())
    assert sorted(calls) == list(range(400))
    for value, result in enumerate(results):
        assert result.args == (value,) if value % 3 == 0 else result == value


class Asks(Behaviour):
    """Behaviour that waits for a thread, as it does when it asks Ray for the step."""

    def around(self, call: Call) -> Around:
        assert (yield InThread(threading.get_ident)) != threading.get_ident()
        yield CALL
        return None


@pytest.mark.fault("the loop's own executor is full of the user's jobs", "goes on", "nothing")
def test_a_stage_does_not_wait_for_the_users_executor(behave: Any) -> None:
    behave(Asks())
    done = threading.Event()

    async def stage() -> str:
        done.set()
        return "ran"

    async def main() -> str:
        executor = ThreadPoolExecutor(1)
        asyncio.get_running_loop().set_default_executor(executor)
        # It waits for the stage's work.
        waiting = asyncio.get_running_loop().run_in_executor(None, done.wait, 60)
        result = await wrap(stage, "k")()
        assert await waiting
        return str(result)

    assert asyncio.run(main()) == "ran"


def test_without_ray_a_coroutine_function_takes_no_extra_turn_of_its_loop(hooked: Any, joined: Any) -> None:
    joined(steps="")

    async def stage() -> None:
        pass

    wrapped = hooked(stage, "stage", stage="x", role="actor")()
    with pytest.raises(StopIteration):
        wrapped.send(None)


def test_without_new_threads_a_wait_runs_in_the_calling_thread(behave: Any, mocker: MockerFixture) -> None:
    mocker.patch("threading.Thread.start", side_effect=RuntimeError("can't start new thread"))
    assert asyncio.run(InThread(int, "7").suspend()) == 7
