"""The wrappers that go around a target's functions, and the seam where autoprof's own errors end.

The user's function is called exactly once, with its own arguments, and its result and exceptions pass unchanged,
whatever a behaviour does. Wrappers are plain functions: cloudpickle drops a wrapt FunctionWrapper from an actor class
without a word (Ray 2.47 to 2.60), and it ships these either by reference, where the receiving process has its own
patch, or by value. So they refer to nothing of autoprof but by an import inside the call: a process that can't
import autoprof still runs the user's function.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Generator
from typing import Any, NamedTuple, TypeAlias

from autoprof.paths import MISSING, follow


class Outcome(NamedTuple):
    """How the user's function ended: its result, or the exception it raised."""

    result: Any
    error: BaseException | None


class Reply(NamedTuple):
    """Answers a call that autoprof itself made to a function of the target, in the function's place.

    A behaviour returns it before its `yield CALL`. It must never be the answer to a call of the user's.
    """

    value: Any


class Wait:
    """Something that a behaviour waits for: `answers = yield Wait(...)`. Never raises but to say that time is up."""

    def block(self) -> Any:
        """Wait in a synchronous function."""
        raise NotImplementedError

    async def suspend(self) -> Any:
        """Wait in a coroutine function, without blocking its event loop."""
        raise NotImplementedError


# `outcome = yield CALL` in a behaviour: the user's function is called now.
CALL: None = None
Around: TypeAlias = Generator["Wait | None", Any, "Reply | None"]


class Call:
    """One call of a wrapped function."""

    __slots__ = ("args", "function", "key", "kwargs")

    def __init__(self, key: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.key = key
        self.function = function
        self.args = args
        self.kwargs = kwargs

    @property
    def instance(self) -> Any:
        """The first argument: `self` of a method."""
        return self.args[0] if self.args else None

    def argument(self, name: str) -> Any:
        """The argument called `name`, or the default in the function's signature.

        Raises:
            LookupError: The function has no such parameter.
        """
        if name in self.kwargs:
            return self.kwargs[name]
        if name == "self" and self.args:
            return self.args[0]
        bound = inspect.signature(self.function).bind_partial(*self.args, **self.kwargs)
        bound.apply_defaults()
        return bound.arguments[name]

    def at(self, path: str, default: Any = MISSING) -> Any:
        """What lies at a path of a recipe, whose first name is a parameter: `self.global_steps`, `prompts.meta_info`.

        Raises:
            LookupError: A name is not there, and there is no `default`.
        """
        name, _, rest = path.partition(".")
        try:
            value = self.argument(name)
        except LookupError:
            if default is not MISSING:
                return default
            raise LookupError(f"there is no parameter {name} (of {path})") from None
        return follow(value, rest, default) if rest else value


def wrap(function: Callable[..., Any], key: str) -> Callable[..., Any]:
    """Put the hook called `key` around `function`.

    Raises:
        TypeError: `function` is a generator function, which is not done when its call returns.
    """
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError("it is a generator function")
    return _wrap_coroutine(function, key) if inspect.iscoroutinefunction(function) else _wrap_plain(function, key)


def wrapped_by(function: Any) -> set[str]:
    """The keys of the hooks around `function`, known by their code: `functools.wraps` would copy a marker."""
    keys = set()
    while function is not None:
        if getattr(function, "__code__", None) in _WRAPPER_CODES:
            cells = dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))
            keys.add(cells["key"].cell_contents)
        function = getattr(function, "__wrapped__", None)
    return keys


def _wrap_plain(function: Callable[..., Any], key: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def autoprof_wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            from autoprof.wrapping import drive
        except Exception:
            pass  # the call is not made here: our error would be the context of the user's
        else:
            return drive(key, function, args, kwargs)
        return function(*args, **kwargs)

    return autoprof_wrapper


def _wrap_coroutine(function: Callable[..., Any], key: str) -> Callable[..., Any]:
    @functools.wraps(function)
    async def autoprof_wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            from autoprof.wrapping import drive_coroutine
        except Exception:
            pass
        else:
            return await drive_coroutine(key, function, args, kwargs)
        return await function(*args, **kwargs)

    return autoprof_wrapper


_WRAPPER_CODES = (
    _wrap_plain(lambda: None, "").__code__,
    _wrap_coroutine(lambda: None, "").__code__,
)


def drive(key: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `function` with the behaviour of the hook `key` around it."""
    run = _Run(Call(key, function, args, kwargs))
    wait = run.before()
    while wait is not None:
        wait = run.resume(*_block(wait))
    if run.reply is not None:
        return run.reply.value
    try:
        result = function(*args, **kwargs)
    except BaseException as error:
        traceback = error.__traceback__
        try:
            wait = run.after(Outcome(None, error))
            while wait is not None:
                wait = run.resume(*_block(wait))
        finally:
            error.__traceback__ = traceback
            del traceback
        raise
    wait = run.after(Outcome(result, None))
    while wait is not None:
        wait = run.resume(*_block(wait))
    return result


async def drive_coroutine(key: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Await `function` with the behaviour of the hook `key` around it."""
    run = _Run(Call(key, function, args, kwargs))
    wait = run.before()
    while wait is not None:
        wait = run.resume(*await _suspend(wait))
    if run.reply is not None:
        return run.reply.value
    try:
        result = await function(*args, **kwargs)
    except BaseException as error:
        traceback = error.__traceback__
        try:
            wait = run.after(Outcome(None, error))
            while wait is not None:
                # A coroutine that is being closed must not wait any more.
                closed = isinstance(error, GeneratorExit)
                answer = (None, TimeoutError("the coroutine was closed")) if closed else await _suspend(wait)
                wait = run.resume(*answer)
                del answer
        finally:
            error.__traceback__ = traceback
            del traceback
        raise
    wait = run.after(Outcome(result, None))
    while wait is not None:
        wait = run.resume(*await _suspend(wait))
    return result


def _block(wait: Wait) -> tuple[Any, Exception | None]:
    try:
        return wait.block(), None
    except Exception as error:
        return None, error


async def _suspend(wait: Wait) -> tuple[Any, Exception | None]:
    try:
        return await wait.suspend(), None
    except asyncio.CancelledError:
        raise
    except Exception as error:
        return None, error


class _Run:
    """A behaviour's generator during one call. This is the seam: no exception of ours leaves it."""

    __slots__ = ("_around", "_called", "_key", "reply")

    def __init__(self, call: Call) -> None:
        self.reply: Reply | None = None
        self._around: Around | None = None
        self._called = False
        self._key = call.key
        try:
            from autoprof import importing

            behaviour = importing.behaviour(call.key)
            if behaviour is not None and behaviour.applies(call):
                self._around = behaviour.around(call)
        except Exception as error:
            self._failed(error)

    def before(self) -> Wait | None:
        """Run the behaviour up to the call; what it returns is to be waited for first."""
        return self._advance(lambda around: next(around))

    def after(self, outcome: Outcome) -> Wait | None:
        """Go on with the behaviour after the call."""
        self._called = True
        return self._advance(lambda around: around.send(outcome))

    def resume(self, answer: Any, error: Exception | None) -> Wait | None:
        """Go on with the behaviour after it waited."""
        if error is not None:
            try:
                return self._advance(lambda around: around.throw(error))
            finally:
                error.__traceback__ = None  # as in _failed
        return self._advance(lambda around: around.send(answer))

    def _advance(self, move: Callable[[Around], Wait | None]) -> Wait | None:
        if self._around is None:
            return None
        try:
            wait = move(self._around)
            if wait is None and self._called:
                self._around.close()
                raise RuntimeError("the behaviour yielded to the call twice")
            return wait
        except StopIteration as stop:
            self._around = None
            if isinstance(stop.value, Reply) and not self._called:
                self.reply = stop.value
        except Exception as error:
            self._around = None
            self._failed(error)
        return None

    def _failed(self, error: Exception) -> None:
        try:
            from autoprof import runtime

            runtime.report(self._key, error)
        except Exception:  # not even the report works: the user's call matters more
            pass
        # Its frames hold the user's arguments, and some of them the error itself: a cycle, which would keep a model.
        error.__traceback__ = None
