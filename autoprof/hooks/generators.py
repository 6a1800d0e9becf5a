"""Wrappers around generator functions, and generators around those that other functions return.

`yield from` would not do: it hands on no `GeneratorExit` that is thrown, and ends a generator that ignores one.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator

    from autoprof.hooks.call import Call


def wrap(function: Callable[..., Any], key: str, made: Call | None = None) -> Callable[..., Any]:
    """Put the hook called `key` around each item of a generator function; `made` is the call, if there is one."""

    @functools.wraps(function)
    def autoprof_wrapper(*args: Any, **kwargs: Any) -> Any:
        inner = function(*args, **kwargs)
        call = made
        try:
            from autoprof.hooks.call import Call
            from autoprof.hooks.items import advance
        except Exception as error:
            if (theirs := sys.modules.get("autoprof.base.interrupts")) is not None:
                theirs.pass_on(error)
        else:
            call = call or Call(key, function, args, kwargs)
        resume, given = inner.send, None
        while True:
            try:
                item = resume(given) if call is None else advance(call, resume, given)
            except StopIteration as end:
                return end.value
            finally:
                given = None  # an exception would hold this frame, which would hold it
            try:
                given = yield item
                resume = inner.send
            except BaseException as error:
                resume, given = inner.throw, error

    return autoprof_wrapper


def wrap_async(function: Callable[..., Any], key: str, made: Call | None = None) -> Callable[..., Any]:
    """Put the hook called `key` around each item of an asynchronous generator function."""

    @functools.wraps(function)
    async def autoprof_wrapper(*args: Any, **kwargs: Any) -> Any:
        inner = function(*args, **kwargs)
        call = made
        try:
            from autoprof.hooks.call import Call
            from autoprof.hooks.items import advance_coroutine
        except Exception as error:
            if (theirs := sys.modules.get("autoprof.base.interrupts")) is not None:
                theirs.pass_on(error)
        else:
            call = call or Call(key, function, args, kwargs)
        resume, given = inner.asend, None
        while True:
            try:
                item = await (resume(given) if call is None else advance_coroutine(call, resume, given))
            except StopAsyncIteration:
                return
            finally:
                given = None
            try:
                given = yield item
                resume = inner.asend
            except BaseException as error:
                resume, given = inner.athrow, error

    return autoprof_wrapper


def generate(call: Call, inner: Generator[Any, Any, Any]) -> Any:
    """Return a generator around one that a call has returned, as a wrapper around a generator function does."""
    return wrap(lambda: inner, call.key, call)()


def agenerate(call: Call, inner: AsyncGenerator[Any, Any]) -> Any:
    """Return an asynchronous generator around one that a call has returned."""
    return wrap_async(lambda: inner, call.key, call)()
