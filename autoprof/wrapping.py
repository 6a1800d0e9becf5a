"""The wrappers that go around a target's functions.

They are plain functions: cloudpickle drops a wrapt FunctionWrapper from an actor class without a word (Ray 2.47 to
2.60), and it ships these either by reference, where the receiving process has its own patch, or by value. So they refer
to nothing of autoprof but by an import inside the call, and to a gate that arrives as an empty list: a process that
can't import autoprof still runs the user's function.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Generator
from types import FunctionType
from typing import Any, NamedTuple, TypeAlias

from autoprof.gates import Gate, gate
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
        if (found := _given(self.function, name, self.args)) is not MISSING:
            return found
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


def _given(function: Any, name: str, args: tuple[Any, ...]) -> Any:
    """The argument that was given by position, or the default; MISSING where the signature must be asked, which takes
    30 us.

    Raises:
        LookupError: There is neither.
    """
    if type(function) is not FunctionType or function.__dict__:
        # As `inspect.signature` does; what leads nowhere, as a proxy that has every attribute, raises.
        function = inspect.unwrap(function, stop=lambda each: hasattr(each, "__signature__"))
    if type(function) is not FunctionType or hasattr(function, "__signature__"):
        return MISSING
    code = function.__code__
    names, count = code.co_varnames, code.co_argcount
    if name in names[:count]:
        place = names.index(name)
        if place < len(args):
            return args[place]
        defaults = function.__defaults__ or ()
        return defaults[place - count + len(defaults)] if count - place <= len(defaults) else _none(name)
    if name in names[count : count + code.co_kwonlyargcount]:
        return (function.__kwdefaults__ or {})[name]
    # What is left are `*args` and `**kwargs`.
    several = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    first = count + code.co_kwonlyargcount
    return MISSING if name in names[first : first + several] else _none(name)


def _none(name: str) -> Any:
    raise LookupError(name)


def wrap(function: Callable[..., Any], key: str) -> Callable[..., Any]:
    """Put the hook called `key` around `function`.

    Raises:
        TypeError: `function` is a generator function, which is not done when its call returns.
    """
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError("it is a generator function")
    around = _wrap_coroutine if inspect.iscoroutinefunction(function) else _wrap_plain
    return around(function, key, gate(key))


def wrapped_by(function: Any) -> set[str]:
    """The keys of the hooks around `function`, known by their code: `functools.wraps` would copy a marker."""
    keys = set()
    while function is not None:
        if (key := wrapper_key(function)) is not None:
            keys.add(key)
        function = getattr(function, "__wrapped__", None)
    return keys


def wrapper_key(function: Any) -> str | None:
    """The key of the hook whose wrapper `function` itself is, or None."""
    if getattr(function, "__code__", None) not in _WRAPPER_CODES:
        return None
    cells = dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))
    return str(cells["key"].cell_contents)


def _wrap_plain(function: Callable[..., Any], key: str, closed: Gate) -> Callable[..., Any]:
    @functools.wraps(function)
    def autoprof_wrapper(*args: Any, **kwargs: Any) -> Any:
        if closed:
            return function(*args, **kwargs)
        try:
            from autoprof.seam import drive
        except Exception as error:  # the call is not made here: our error would be the context of the user's
            if (interrupts := sys.modules.get("autoprof.interrupts")) is not None:
                interrupts.pass_on(error)
        else:
            return drive(key, function, args, kwargs)
        return function(*args, **kwargs)

    return autoprof_wrapper


def _wrap_coroutine(function: Callable[..., Any], key: str, closed: Gate) -> Callable[..., Any]:
    @functools.wraps(function)
    async def autoprof_wrapper(*args: Any, **kwargs: Any) -> Any:
        if closed:
            return await function(*args, **kwargs)
        try:
            from autoprof.seam import drive_coroutine
        except Exception as error:
            if (interrupts := sys.modules.get("autoprof.interrupts")) is not None:
                interrupts.pass_on(error)
        else:
            return await drive_coroutine(key, function, args, kwargs)
        return await function(*args, **kwargs)

    return autoprof_wrapper


_WRAPPER_CODES = (
    _wrap_plain(lambda: None, "", Gate()).__code__,
    _wrap_coroutine(lambda: None, "", Gate()).__code__,
)
