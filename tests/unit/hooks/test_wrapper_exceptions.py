"""The user's exceptions pass wrappers unchanged, and wrappers keep no object of a call alive."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import subprocess
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import pytest

from autoprof.hooks.behaviour import CALL, Call
from autoprof.hooks.wrapper import wrap
from tests.support.helpers import ROOT
from tests.support.misbehaving import BEHAVIOURS, NAMES, Now, Scripted

Behave = Callable[[Scripted], None]
# Prefixes of the paths of autoprof's frames. The checkout's parent folder may be named autoprof, too.
OURS = f"{ROOT / 'autoprof'}/"


class Strange(BaseException):
    """An exception that only `except BaseException` catches."""


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    """An exception whose attributes can't be set."""

    text: str


class Refuses(Exception):
    def __setattr__(self, name: str, value: object) -> None:
        raise RuntimeError(f"{name} is set")


KINDS = [
    ValueError,
    Frozen,
    Refuses,
    KeyboardInterrupt,
    SystemExit,
    asyncio.CancelledError,
    StopIteration,
    StopAsyncIteration,
    GeneratorExit,
    ImportError,
    Strange,
]
CAUSE, CONTEXT, OUTER = OSError("cause"), LookupError("context"), ArithmeticError("outer")
HOWS = ["plain", "cause", "context", "from none", "again"]


def fail(error: BaseException, how: str) -> None:
    if how == "cause":
        raise error from CAUSE
    if how == "from none":
        raise error from None
    if how == "context":
        try:
            raise CONTEXT
        except LookupError:
            raise error  # noqa: B904
    if how == "again":
        try:
            raise error
        except BaseException as caught:
            raise caught
    raise error


def work(calls: list[Any], error: BaseException, how: str) -> None:
    calls.append(error)
    fail(error, how)


async def awork(calls: list[Any], error: BaseException, how: str) -> None:
    calls.append(error)
    await asyncio.sleep(0)
    fail(error, how)


def run(coroutine: Any) -> Any:
    """Run a coroutine whose awaits are turns of an event loop, without one: that would act on some exceptions."""
    try:
        while True:
            coroutine.send(None)
    except StopIteration as stop:
        return stop.value


def caught(function: Callable[..., Any], error: BaseException, how: str, within: bool) -> tuple[Any, list[Any]]:
    """Return the exception of a call and the function's notes. The call may be made in an exception handler."""
    calls: list[Any] = []

    def call() -> None:
        result = function(calls, error, how)
        if result is not None:
            run(result)

    try:
        if within:
            try:
                raise OUTER
            except ArithmeticError:
                call()
        else:
            call()
    except BaseException as found:
        return found, calls
    raise AssertionError("it raised nothing")


def frames(error: BaseException) -> list[str]:
    return [f"{frame.filename}:{frame.name}" for frame in traceback.extract_tb(error.__traceback__)]


@pytest.mark.parametrize("function", [work, awork])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("within", [False, True])
def test_any_exception_passes_unchanged(
    behave: Behave, function: Any, kind: type[BaseException], how: str, within: bool
) -> None:
    for name, behaviour in zip(NAMES, BEHAVIOURS, strict=True):
        behave(behaviour)
        bare, wrapped = kind("the user's"), kind("the user's")
        expected, _ = caught(function, bare, how, within)
        found, calls = caught(wrap(function, "k"), wrapped, how, within)
        assert calls == [wrapped], name
        if expected is bare:
            assert found is wrapped, name
        else:  # Python itself replaces StopIteration by a RuntimeError
            assert (type(found), str(found)) == (type(expected), str(expected)), name
            assert found.__cause__ is wrapped, name
            found, expected = wrapped, bare
        assert found.__cause__ is expected.__cause__, name
        assert found.__context__ is expected.__context__, name
        assert found.__suppress_context__ == expected.__suppress_context__, name
        # Python 3.10 keeps the frames of a re-raise if the exception is not an Exception.
        if sys.version_info >= (3, 11) or isinstance(found, Exception) or "raises_the_users_error" not in name:
            ours = [frame for frame in frames(found) if frame.startswith(OURS)]
            assert len(ours) <= 2, name
            assert [frame for frame in frames(found) if frame not in ours] == frames(expected), name


@pytest.mark.parametrize("function", [work, awork])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, asyncio.CancelledError, Strange])
@pytest.mark.parametrize("place", ["before", "wait before", "after", "wait after"])
def test_an_interruption_of_autoprofs_code_reaches_the_user(
    behave: Behave, function: Any, kind: type[BaseException], place: str
) -> None:
    interruption = kind()

    def interrupted(call: Call) -> Iterator[Any]:
        for state in ("before", CALL, "after"):
            if state is CALL:
                yield CALL
            elif place == state:
                raise interruption
            elif place == f"wait {state}":
                yield Now(interruption)

    behave(Scripted(script=interrupted))
    error = ValueError()
    found, calls = caught(wrap(function, "k"), error, "plain", False)
    assert found is interruption
    assert len(calls) == ("after" in place)
    assert found.__context__ is (error if "after" in place else None)


class Model:
    """An object that must not be kept alive, such as a large model."""


class Failure(Exception):
    """An exception that can have weak references."""


@pytest.mark.parametrize("raises", [False, True], ids=["returns", "raises"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_no_object_of_a_call_is_kept_alive(behave: Behave, asynchronous: bool, raises: bool) -> None:
    def plain(model: Model, batch: Model) -> Model:
        if raises:
            raise Failure(batch)
        return batch

    async def coroutine(model: Model, batch: Model) -> Model:
        await asyncio.sleep(0)
        return plain(model, batch)

    wrapper = wrap(coroutine if asynchronous else plain, "k")

    def call(behaviour: Scripted) -> list[weakref.ref[Any]]:
        behave(behaviour)
        model, batch = Model(), Model()
        try:
            result = wrapper(model, batch=batch)
            assert (run(result) if asynchronous else result) is batch
        except Failure as error:
            assert error.args == (batch,)
            return [weakref.ref(model), weakref.ref(batch), weakref.ref(error)]
        return [weakref.ref(model), weakref.ref(batch)]

    for behaviour in BEHAVIOURS:
        call(behaviour)
    gc.collect()
    gc.disable()
    try:
        for name, behaviour in zip(NAMES, BEHAVIOURS, strict=True):
            assert [found() for found in call(behaviour) if found() is not None] == [], name
    finally:
        gc.enable()


ELSEWHERE = """
import asyncio, sys
sys.modules["autoprof"] = None
import cloudpickle
for function in cloudpickle.loads(bytes.fromhex(sys.stdin.read())):
    try:
        assert sys.exc_info() == (None, None, None)
        result = function()
        if asyncio.iscoroutine(result):
            asyncio.run(result)
    except LookupError as error:
        print(error, error.__context__, error.__cause__)
"""


def test_exceptions_without_an_importable_autoprof_do_not_mention_it() -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    body = "import sys; raise LookupError(sys.exc_info()[1])"
    exec(f"def work(): {body}\nasync def awork(): {body}\n", namespace)
    pickled = cloudpickle.dumps([wrap(namespace[name], "k") for name in ("work", "awork")]).hex()
    command = [sys.executable, "-c", ELSEWHERE]
    output = subprocess.run(command, input=pickled, capture_output=True, text=True, check=True).stdout
    assert output.splitlines() == ["None None None"] * 2
