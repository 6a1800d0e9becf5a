from __future__ import annotations

import asyncio
import gc
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
from pytest_mock import MockerFixture

from autoprof.hooks import registry
from autoprof.hooks.behaviour import CALL, Around, Behaviour, Call, Outcome, Reply
from autoprof.hooks.wrapper import wrap, wrapped_by
from autoprof.run import runtime
from tests.support.misbehaving import Now


class Recorder(Behaviour):
    """A behaviour whose generator function is the test's `script`. It records the calls and outcomes."""

    script: Callable[[Call, list[Any]], Around]
    seen: list[Any] = []

    def around(self, call: Call) -> Around:
        return self.script(call, self.seen)


def usual(call: Call, seen: list[Any]) -> Around:
    seen.append((call.instance, call.args[1:], call.kwargs))
    seen.append((yield Now("before")))
    seen.append((yield CALL))
    seen.append((yield Now("after")))
    return None


def fails_after(call: Call, seen: list[Any]) -> Around:
    seen.append((yield CALL))
    raise RuntimeError("ours")


def wait_fails(call: Call, seen: list[Any]) -> Around:
    try:
        yield Now(TimeoutError("too late"))
    except TimeoutError as error:
        seen.append(str(error))
    yield CALL
    return None


def replies(call: Call, seen: list[Any]) -> Around:
    yield Now(1)
    return Reply("instead")


class Worker:
    calls = 0
    ready = True

    def work(self, a: int, b: int = 2) -> int:
        """Adds."""
        self.calls += 1
        return a + b

    async def awork(self, a: int, b: int = 2) -> int:
        self.calls += 1
        await asyncio.sleep(0)
        return a + b


@pytest.fixture
def hook(mocker: MockerFixture) -> Callable[[Any], Recorder]:
    """Have the hook `k` behave as a script says."""

    def use(script: Any) -> Recorder:
        recorder = Recorder(script=script)
        mocker.patch.object(registry, "active", side_effect=lambda key: (None, recorder))
        return recorder

    return use


def call(worker: Worker, name: str, *args: Any, **kwargs: Any) -> Any:
    result = wrap(getattr(Worker, name), "k")(worker, *args, **kwargs)
    return asyncio.run(result) if inspect.iscoroutine(result) else result


@pytest.mark.parametrize(
    ("when", "unless", "around"),
    [
        ({"a": "1"}, "", True),
        ({"a": "2"}, "", False),
        ({"a": "1", "self.calls": "0"}, "", True),
        ({"self.nothing": "1"}, "", False),
        ({}, "a", False),
        ({}, "self.calls", True),
        ({}, "self.nothing.at.all", True),
        ({"a": "1"}, "b", False),
        ({"a": 1}, "", True),
        ({"a": 1.0}, "", True),
        ({"a": 2}, "", False),
        ({"a": True}, "", False),
        ({"self.ready": True}, "", True),
        ({"self.ready": False}, "", False),
        ({"self.ready": 1}, "", False),
        ({"self.ready": "True"}, "", True),
        ({"self.nothing": False}, "", False),
        ({"a": ["x", 1]}, "", True),
        ({"a": ["x", 2]}, "", False),
        ({"a": [1, 2], "self.ready": [False]}, "", False),
        ({"a": []}, "", False),
    ],
)
def test_a_hook_is_for_some_calls_only(hook: Any, when: dict[str, Any], unless: str, around: bool) -> None:
    recorder = hook(usual)
    recorder.when, recorder.unless = when, unless
    assert call(Worker(), "work", 1, b=5) == 6
    assert bool(recorder.seen) == around


@pytest.mark.parametrize("name", ["work", "awork"])
def test_a_behaviour_goes_around_the_call(hook: Any, name: str) -> None:
    recorder, worker = hook(usual), Worker()
    assert call(worker, name, 1, b=5) == 6
    assert worker.calls == 1
    assert recorder.seen == [(worker, (1,), {"b": 5}), "before", Outcome(6, None), "after"]


def test_our_error_is_reported(hook: Any, mocker: MockerFixture) -> None:
    report = mocker.patch.object(runtime, "report")
    hook(fails_after)
    call(Worker(), "work", 1)
    ((key, error),) = [found.args for found in report.call_args_list]
    assert (key, str(error)) == ("k", "ours")


def test_a_missing_behaviour_does_no_harm(mocker: MockerFixture) -> None:
    mocker.patch.object(registry, "active", side_effect=ImportError("gone"))
    mocker.patch.object(runtime, "report", side_effect=MemoryError)
    worker = Worker()
    assert call(worker, "work", 1) == 3
    assert worker.calls == 1


def test_a_wait_that_fails_reaches_the_behaviour(hook: Any) -> None:
    recorder = hook(wait_fails)
    call(Worker(), "awork", 1)
    assert recorder.seen == ["too late"]


@pytest.mark.parametrize("name", ["work", "awork"])
def test_a_reply_answers_in_the_functions_place(hook: Any, name: str) -> None:
    hook(replies)
    worker = Worker()
    assert call(worker, name, 1) == "instead"
    assert worker.calls == 0


def test_wrappers_are_recognized_by_their_code() -> None:
    assert wrapped_by(Worker.work) == set()
    assert wrapped_by(wrap(wrap(Worker.work, "inner"), "outer")) == {"inner", "outer"}
    assert wrapped_by(cloudpickle.loads(cloudpickle.dumps(wrap(Worker.awork, "k")))) == {"k"}


def test_arguments_by_name() -> None:
    made = Call("k", Worker.work, (Worker(), 7), {})
    assert (made.argument("a"), made.argument("b")) == (7, 2)
    with pytest.raises(LookupError):
        made.argument("c")


def test_a_function_whose_argument_was_read_can_be_freed() -> None:
    def work(batch: Any, size: int = 1) -> Any:
        return batch

    kept = weakref.ref(work)
    assert Call("hook", work, (5,), {}).argument("size") == 1
    work.__defaults__ = (2,)
    assert Call("hook", work, (5,), {}).argument("size") == 2
    del work
    gc.collect()
    assert kept() is None


def test_an_argument_of_a_proxy_that_has_every_attribute_is_not_looked_for_forever() -> None:
    class Proxy:
        def __getattr__(self, name: str) -> Proxy:
            return Proxy()

        def __call__(self, batch: Any) -> Any:
            return batch

    with pytest.raises(TypeError):
        Call("hook", Proxy(), (1,), {}).argument("batch")
