"""Wrappers around the functions of a target.

Wrappers are plain functions, because cloudpickle silently drops a wrapt `FunctionWrapper` from an actor class (Ray 2.47
to 2.60).

cloudpickle pickles a plain function by reference or by value. After a reference, the receiving process applies its own
hooks. With a value, the receiving process may be unable to import autoprof, and must still run the user's function. So
a wrapper imports autoprof only inside the call. The only object of autoprof in a wrapper is a gate, which pickles as an
empty list.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

from autoprof.hooks import returned
from autoprof.hooks.registry import Gate, gate


def wrap(function: Callable[..., Any], key: str, around: str = "call") -> Callable[..., Any]:
    """Return a wrapper that puts the hook `key` around `function`.

    Args:
        function: Function to wrap.
        key: Key of the hook.
        around: `call` to surround the call. `with` to surround the `with` blocks of the function's result. `next` to
            surround each item of the function's result (`behaviour.Extent`).

    Raises:
        TypeError: `function` is a generator function and `around` is not `next`. A generator does its work after the
            call, so a hook around the call would see nothing.
    """
    closed = gate(key)
    for is_generator, wrap_items in _GENERATORS:
        if is_generator(function):
            if around != "next":
                raise TypeError('it is a generator function; set around = "next"')
            return wrap_items(function, key)
    wrapper = _wrap_coroutine if inspect.iscoroutinefunction(function) else _wrap_plain
    return wrapper(function, key, closed, around)


def wrapped_by(function: Any) -> set[str]:
    """Return the keys of the hooks around `function`.

    Wrappers are recognized by their code objects. A marker attribute would not do, because `functools.wraps` would copy
    the attribute to other functions.
    """
    keys = set()
    while function is not None:
        if (key := wrapper_key(function)) is not None:
            keys.add(key)
        function = getattr(function, "__wrapped__", None)
    return keys


def wrapper_key(function: Any) -> str | None:
    """If `function` itself is a wrapper, return the key of its hook. Otherwise return None."""
    if getattr(function, "__code__", None) not in _WRAPPER_CODES:
        return None
    cells = dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))
    return str(cells["key"].cell_contents)


def _wrap_plain(function: Callable[..., Any], key: str, closed: Gate, around: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def autoprof_wrapper(*args: Any, **kwargs: Any) -> Any:
        if closed:
            return function(*args, **kwargs)
        try:
            if around == "call":
                from autoprof.hooks.dispatch import drive
            else:
                from autoprof.hooks.returned import watch
        except Exception as error:
            # Don't call the function here: this error would become the context of the user's exceptions.
            if (seam := sys.modules.get("autoprof.base.seam")) is not None:
                seam.pass_on(error)
        else:
            if around == "call":
                return drive(key, function, args, kwargs)
            return watch(key, function, args, kwargs, function(*args, **kwargs), around)
        return function(*args, **kwargs)

    return autoprof_wrapper


def _wrap_coroutine(function: Callable[..., Any], key: str, closed: Gate, around: str) -> Callable[..., Any]:
    @functools.wraps(function)
    async def autoprof_wrapper(*args: Any, **kwargs: Any) -> Any:
        if closed:
            return await function(*args, **kwargs)
        try:
            if around == "call":
                from autoprof.hooks.dispatch import drive_coroutine
            else:
                from autoprof.hooks.returned import watch
        except Exception as error:
            if (seam := sys.modules.get("autoprof.base.seam")) is not None:
                seam.pass_on(error)
        else:
            if around == "call":
                return await drive_coroutine(key, function, args, kwargs)
            return watch(key, function, args, kwargs, await function(*args, **kwargs), around)
        return await function(*args, **kwargs)

    return autoprof_wrapper


_GENERATORS = (
    (inspect.isgeneratorfunction, returned.wrap_generator),
    (inspect.isasyncgenfunction, returned.wrap_async_generator),
)
_WRAPPER_CODES = (
    _wrap_plain(lambda: None, "", Gate(), "").__code__,
    _wrap_coroutine(lambda: None, "", Gate(), "").__code__,
    returned.wrap_generator(lambda: None, "").__code__,
    returned.wrap_async_generator(lambda: None, "").__code__,
)
