"""For any arguments and any behaviour, a wrapped function is called once and has the same result or exception."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoprof.hooks import patching
from autoprof.hooks.wrapper import wrap
from tests.support.misbehaving import BEHAVIOURS, Scripted

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
