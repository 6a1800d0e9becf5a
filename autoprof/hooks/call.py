"""Vocabulary between wrappers and behaviours: the call, its outcome, replies and waits."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from types import FunctionType
from typing import Any, Literal, NamedTuple, TypeAlias

from autoprof.base import interrupts
from autoprof.hooks.attribute_path import MISSING, follow


class Outcome(NamedTuple):
    """The end of the user's function: its result, or the exception it raised. `over`: an iterator had no more items."""

    result: Any
    error: BaseException | None
    over: bool = False


class Reply(NamedTuple):
    """An answer, in the function's place, to a call that autoprof itself made to a function of the target.

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


# What a hook goes around: the call, the `with` blocks of what it returns, or each `next` of what it returns.
Extent: TypeAlias = Literal["call", "with", "next"]
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
        """Return the first argument: `self` of a method."""
        return self.args[0] if self.args else None

    def argument(self, name: str) -> Any:
        """Return the argument called `name`, or the default in the function's signature.

        Raises:
            LookupError: The function has no such parameter.
        """
        if name in self.kwargs:
            return self.kwargs[name]
        if name == "self" and self.args:
            return self.args[0]
        if (found := given(self.function, name, self.args)) is not MISSING:
            return found
        bound = inspect.signature(self.function).bind_partial(*self.args, **self.kwargs)
        bound.apply_defaults()
        return bound.arguments[name]

    def at(self, path: str, default: Any = MISSING) -> Any:
        """Return the value at a recipe's path, which begins with a parameter: `self.global_steps`, `prompts.meta_info`.

        Raises:
            LookupError: A name is not there, and there is no `default`.
        """
        name, _, rest = path.partition(".")
        try:
            value = self.argument(name)
        except LookupError as error:
            interrupts.pass_on(error)
            if default is not MISSING:
                return default
            raise LookupError(f"there is no parameter {name} (of {path})") from None
        return follow(value, rest, default) if rest else value


def given(function: Any, name: str, args: tuple[Any, ...]) -> Any:
    """Return the argument that was given by position, or the default.

    Returns MISSING if only the signature can tell, which takes 30 us.

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
