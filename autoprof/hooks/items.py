"""Hooks around a piece of work that is no whole call: one item of an iterator, a block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from autoprof.base import exceptions
from autoprof.hooks import dispatch, gates
from autoprof.hooks.call import Call, Outcome

# Behaviours that have been entered, the outermost first.
Runs: TypeAlias = list[dispatch.Driven]


def advance(call: Call, resume: Callable[[Any], Any], given: Any) -> Any:
    """Have a generator make its next item: `resume(given)` is a call of its `send` or `throw`."""
    if dispatch.compiling() or issubclass(type(given), GeneratorExit) or gates.gate(call.key):
        return resume(given)
    return within([dispatch.enter(call)], resume, given)


async def advance_coroutine(call: Call, resume: Callable[[Any], Any], given: Any) -> Any:
    """Have an asynchronous generator make its next item."""
    if issubclass(type(given), GeneratorExit) or gates.gate(call.key):
        return await resume(given)
    return await within_coroutine([await dispatch.enter_coroutine(call)], resume, given)


def within(runs: Runs, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function for which the hooks have been entered, and leave them."""
    try:
        result = function(*args)
    except BaseException as error:
        leave(runs, _ended(error))
        raise
    leave(runs, Outcome(result, None))
    return result


async def within_coroutine(runs: Runs, function: Callable[..., Any], *args: Any) -> Any:
    """Await a coroutine function for which the hooks have been entered, and leave them."""
    try:
        result = await function(*args)
    except BaseException as error:
        await leave_coroutine(runs, _ended(error))
        raise
    await leave_coroutine(runs, Outcome(result, None))
    return result


def _ended(error: BaseException) -> Outcome:
    over = issubclass(type(error), (StopIteration, StopAsyncIteration))
    return Outcome(None, None if over else error, over)


def leave(runs: Runs, outcome: Outcome) -> None:
    """Leave hooks, the innermost first."""
    traceback = exceptions.traceback_of(outcome.error) if outcome.error is not None else None
    try:
        while runs:
            dispatch.leave(runs.pop(), outcome)
    finally:
        if outcome.error is not None:
            exceptions.set_traceback(outcome.error, traceback)
        del traceback


async def leave_coroutine(runs: Runs, outcome: Outcome) -> None:
    """Leave hooks in a coroutine."""
    traceback = exceptions.traceback_of(outcome.error) if outcome.error is not None else None
    try:
        while runs:
            await dispatch.leave_coroutine(runs.pop(), outcome)
    finally:
        if outcome.error is not None:
            exceptions.set_traceback(outcome.error, traceback)
        del traceback
