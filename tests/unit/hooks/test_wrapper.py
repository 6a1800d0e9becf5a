from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
from pytest_mock import MockerFixture

from autoprof.hooks import registry
from autoprof.hooks.behaviour import CALL, Around, Behaviour, Call, Outcome, Reply, Wait
from autoprof.hooks.wrapper import wrap, wrapped_by
from autoprof.run import runtime


class Now(Wait):
    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def block(self) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def suspend(self) -> Any:
        await asyncio.sleep(0)
        return self.block()


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


def fails_before(call: Call, seen: list[Any]) -> Around:
    raise RuntimeError("ours")
    yield


def fails_after(call: Call, seen: list[Any]) -> Around:
    seen.append((yield CALL))
    raise RuntimeError("ours")


def yields_call_twice(call: Call, seen: list[Any]) -> Around:
    yield CALL
    yield CALL
    return None


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

    def broken(self) -> None:
        self.calls += 1
        raise KeyError("the user's")

    async def abroken(self) -> None:
        self.calls += 1
        raise KeyError("the user's")


@pytest.fixture
def hook(mocker: MockerFixture) -> Callable[[Any], Recorder]:
    """Have the hook `k` behave as a script says."""

    def use(script: Any) -> Recorder:
        recorder = Recorder(script=script)
        mocker.patch.object(registry, "behaviour", side_effect=lambda key: recorder)
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


@pytest.mark.parametrize("script", [usual, fails_before, fails_after, yields_call_twice, wait_fails])
@pytest.mark.parametrize("name", ["work", "awork"])
def test_the_function_is_called_once_and_its_result_passes(hook: Any, name: str, script: Any) -> None:
    hook(script)
    worker = Worker()
    assert call(worker, name, 1) == 3
    assert worker.calls == 1


@pytest.mark.parametrize("script", [usual, fails_before, fails_after, yields_call_twice, wait_fails])
@pytest.mark.parametrize("name", ["broken", "abroken"])
def test_the_functions_exception_passes(hook: Any, name: str, script: Any) -> None:
    hook(script)
    worker = Worker()
    with pytest.raises(KeyError, match="the user's") as caught:
        call(worker, name)
    assert worker.calls == 1
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


def test_our_error_is_reported(hook: Any, mocker: MockerFixture) -> None:
    report = mocker.patch.object(runtime, "report")
    hook(fails_after)
    call(Worker(), "work", 1)
    ((key, error),) = [found.args for found in report.call_args_list]
    assert (key, str(error)) == ("k", "ours")


def test_a_missing_behaviour_does_no_harm(mocker: MockerFixture) -> None:
    mocker.patch.object(registry, "behaviour", side_effect=ImportError("gone"))
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


def test_a_wrapper_looks_like_the_function() -> None:
    wrapper = wrap(Worker.work, "k")
    assert inspect.signature(wrapper) == inspect.signature(Worker.work)
    assert (wrapper.__name__, wrapper.__qualname__, wrapper.__doc__) == ("work", "Worker.work", "Adds.")
    assert inspect.iscoroutinefunction(wrap(Worker.awork, "k"))
    assert not inspect.iscoroutinefunction(wrapper)


def test_wrappers_are_recognized_by_their_code() -> None:
    assert wrapped_by(Worker.work) == set()
    assert wrapped_by(wrap(wrap(Worker.work, "inner"), "outer")) == {"inner", "outer"}
    assert wrapped_by(cloudpickle.loads(cloudpickle.dumps(wrap(Worker.awork, "k")))) == {"k"}


def test_generator_functions_are_refused() -> None:
    def generator() -> Any:
        yield 1

    with pytest.raises(TypeError, match="generator"):
        wrap(generator, "k")


def test_arguments_by_name() -> None:
    made = Call("k", Worker.work, (Worker(), 7), {})
    assert (made.argument("a"), made.argument("b")) == (7, 2)
    with pytest.raises(LookupError):
        made.argument("c")


@pytest.mark.parametrize("name", ["work", "awork"])
def test_a_wrapper_by_value_runs_where_autoprof_can_not_be_imported(name: str) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec("class Mine:\n def work(self): return 41\n async def awork(self): return 41\n", namespace)
    mine = namespace["Mine"]
    setattr(mine, name, wrap(getattr(mine, name), "k"))
    code = f"""
import asyncio, sys
sys.modules["autoprof"] = None
import cloudpickle
result = cloudpickle.loads(bytes.fromhex(sys.stdin.read()))().{name}()
print(asyncio.run(result) if asyncio.iscoroutine(result) else result)
"""
    pickled = cloudpickle.dumps(mine).hex()
    output = subprocess.run([sys.executable, "-c", code], input=pickled, capture_output=True, text=True, check=True)
    assert output.stdout.strip() == "41"


def test_an_argument_of_a_proxy_that_has_every_attribute_is_not_looked_for_forever() -> None:
    class Proxy:
        def __getattr__(self, name: str) -> Proxy:
            return Proxy()

        def __call__(self, batch: Any) -> Any:
            return batch

    with pytest.raises(TypeError):
        Call("hook", Proxy(), (1,), {}).argument("batch")
