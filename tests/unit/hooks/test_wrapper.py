"""Behaviours around wrapped functions, which are called once and have the same result or exception."""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import cloudpickle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pytest_mock import MockerFixture

from autoprof.hooks import patching, registry
from autoprof.hooks.behaviour import CALL, Around, Behaviour, Call, Outcome, Reply
from autoprof.hooks.wrapper import wrap, wrapped_by
from autoprof.run import runtime
from tests.support.misbehaving import BEHAVIOURS, Now, Scripted


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


KINDS = ["function", "method", "classmethod", "staticmethod"]


NAMES = ["a", "b", "c", "d", "e"]


Behave = Callable[[Scripted], None]


class Parameters(NamedTuple):
    """Draw a random signature: the names of its parameters by kind, and the names with defaults."""

    positional: list[str]
    either: list[str]
    keyword: list[str]
    defaults: set[str]
    rest: bool
    more: bool

    def text(self) -> str:
        def named(names: list[str]) -> list[str]:
            return [f"{name}={name!r}" if name in self.defaults else name for name in names]

        parts = [*named(self.positional), *(["/"] if self.positional else []), *named(self.either)]
        parts += ["*rest"] if self.rest else ["*"] if self.keyword else []
        parts += [*named(self.keyword), *(["**more"] if self.more else [])]
        return ", ".join(parts)

    def names(self) -> list[str]:
        given = [*self.positional, *self.either, *self.keyword]
        return given + ["rest"] * self.rest + ["more"] * self.more


@st.composite
def parameters(draw: st.DrawFn) -> Parameters:
    names = draw(st.permutations(NAMES))
    first, second, third = sorted(draw(st.tuples(*[st.integers(0, len(names))] * 3)))
    positional = names[:second]
    without = draw(st.integers(0, len(positional)))
    keyword = names[second:third]
    defaults = {*positional[without:], *draw(st.sets(st.sampled_from(NAMES))).intersection(keyword)}
    return Parameters(names[:first], names[first:second], keyword, defaults, draw(st.booleans()), draw(st.booleans()))


@st.composite
def calls(draw: st.DrawFn) -> tuple[Parameters, list[int], dict[str, int]]:
    """Draw a signature and the arguments of a call, which may not match."""
    found = draw(parameters())
    args = draw(st.lists(st.integers(), max_size=6))
    # Half of the calls are derived from valid ones, since most random calls would be invalid.
    if draw(st.booleans()):
        args = args[: len(found.positional) + len(found.either)]
        free = [*found.either, *found.keyword][max(0, len(args) - len(found.positional)) :]
        return found, args, {name: draw(st.integers()) for name in free if name not in found.defaults}
    return found, args, draw(st.dictionaries(st.sampled_from([*NAMES, "f"]), st.integers(), max_size=5))


def build(found: Parameters, kind: str, asynchronous: bool) -> type:
    """A class `Holder` with a `work` of that kind, which notes its calls and makes a new object each time."""
    first = {"method": "self", "classmethod": "cls"}.get(kind, "")
    text = ", ".join(part for part in (first, found.text()) if part)
    seen = ", ".join([*found.names(), "1"])
    code = [
        "class Holder:",
        "    calls = []",
        *([f"    @{kind}"] if kind in ("classmethod", "staticmethod") else []),
        f"    {'async ' * asynchronous}def work({text}):",
        '        """Works."""',
        f"        Holder.calls.append(((({seen})), object()))",
        "        return Holder.calls[-1][1]",
    ]
    namespace: dict[str, Any] = {"__name__": "toy"}
    exec("\n".join(code), namespace)
    holder: type = namespace["Holder"]
    if kind == "function":
        holder.work = staticmethod(holder.work)  # type: ignore[attr-defined]
    return holder


def patch(holder: type) -> None:
    """Put the hook `k` around `work`, as it is done when a target is imported."""
    behaviour = SimpleNamespace(supply=lambda *args: False, install=lambda *args: False)
    hook = SimpleNamespace(
        key="k", behaviour=behaviour, hook=SimpleNamespace(rewrap="", around="call", attribute="Holder.work")
    )
    patching._patch(hook, SimpleNamespace(Holder=holder), "Holder.work")  # type: ignore[arg-type]


def outcome(function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, str]:
    try:
        result = function(*args, **kwargs)
        return asyncio.run(result) if inspect.iscoroutine(result) else result, ""
    except Exception as error:
        return None, f"{type(error)} {error}"


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("kind", KINDS)
@given(call=calls(), behaviour=st.sampled_from(BEHAVIOURS), bound=st.booleans())
def test_any_call_of_any_signature(
    behave: Behave, kind: str, asynchronous: bool, call: Any, behaviour: Scripted, bound: bool
) -> None:
    behave(behaviour)
    found, args, kwargs = call
    bare, wrapped = build(found, kind, asynchronous), build(found, kind, asynchronous)
    patch(wrapped)
    _, expected = outcome(bare().work if bound else bare.work, args, kwargs)
    result, problem = outcome(wrapped().work if bound else wrapped.work, args, kwargs)
    assert problem == expected
    assert [seen for seen, _ in wrapped.calls] == [seen for seen, _ in bare.calls]
    assert len(wrapped.calls) == (not problem)
    assert [made for _, made in wrapped.calls] == ([] if problem else [result])


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("kind", KINDS)
@given(found=parameters())
def test_a_wrapped_function_looks_the_same(kind: str, asynchronous: bool, found: Parameters) -> None:
    bare, wrapped = build(found, kind, asynchronous), build(found, kind, asynchronous)
    bare.work.__dict__["mark"] = wrapped.work.__dict__["mark"] = object()
    patch(wrapped)
    for was, now in ((bare.work, wrapped.work), (bare().work, wrapped().work)):
        if kind in ("function", "staticmethod") or inspect.ismethod(was):
            assert inspect.signature(now) == inspect.signature(was)
        for name in ("__name__", "__qualname__", "__doc__", "__module__", "__annotations__"):
            assert getattr(now, name) == getattr(was, name)
        assert type(now) is type(was)
        assert now.__wrapped__.__code__.co_code == was.__code__.co_code
        assert now.mark is not None
        for test in (inspect.iscoroutinefunction, inspect.isfunction, inspect.ismethod, inspect.isgeneratorfunction):
            assert test(now) == test(was)
    assert type(inspect.getattr_static(wrapped, "work")) is type(inspect.getattr_static(bare, "work"))


def test_a_partial_function_is_called_as_it_was(behave: Behave) -> None:
    behave(BEHAVIOURS[0])
    assert wrap(functools.partial(max, 5), "k")(3) == 5
    assert wrap(len, "k")([1, 2]) == 2

    async def later(value: int) -> int:
        return value

    partial = wrap(functools.partial(later, 3), "k")
    assert inspect.iscoroutinefunction(partial)
    assert asyncio.run(partial()) == 3
