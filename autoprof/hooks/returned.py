"""Context managers and iterators that hooked functions return: hooks go around their `with` blocks, or each `next`.

Generators are not changed but called by another generator (`generators.py`), since their class is Python's own.
"""

from __future__ import annotations

import asyncio
import types
import weakref
from collections.abc import Callable
from typing import Any

from autoprof.base import exceptions, interrupts, process
from autoprof.base.originals import threading
from autoprof.hooks import gates, subclass
from autoprof.hooks.call import Call, Outcome
from autoprof.hooks.dispatch import compiling, enter, enter_coroutine
from autoprof.hooks.generators import agenerate, generate
from autoprof.hooks.items import Runs, leave, leave_coroutine, within, within_coroutine
from autoprof.run import runtime


class _Watched:
    """An object that hooked functions have returned, with the latest call of each, and what it has been entered for.

    Nothing keeps their arguments alive: they may hold a model, or the object itself.
    """

    def __init__(self, reference: weakref.ref[Any]) -> None:
        self.reference = reference
        self.calls: dict[tuple[str, str], Callable[[], Call]] = {}
        self.entered: dict[object, list[Runs]] = {}


class _State(process.State):
    """The objects that are watched, by their ids."""

    def begin(self) -> None:
        self.watched: dict[int, _Watched] = {}


_state = _State()


def watch(
    key: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], returned: Any, around: str
) -> Any:
    """Have the hook `key` go around the `with` blocks (`around`), or each `next`, of what a call has returned.

    Returns:
        That itself; where it is a generator, one around it.
    """
    if compiling():
        return returned
    try:
        call = Call(key, function, args, kwargs)
        generator = _GENERATORS.get(type(returned)) if around == "next" else None
        if generator is not None:
            made = generator(call, returned)
            made.__name__, made.__qualname__ = returned.__name__, returned.__qualname__
            return made
        _watch(call, returned, around)
    except Exception as error:
        interrupts.pass_on(error)
        runtime.report(key, error)
        if gates.failed(key):
            runtime.switched_off(key, gates.SWITCHED_OFF)
        exceptions.set_traceback(error, None)  # as in dispatch
    return returned


def _watch(call: Call, returned: Any, around: str) -> None:
    kind = type(returned)
    pairs = [names for names in _METHODS[around] if all(hasattr(kind, name) for name in names)]
    if not pairs:
        raise TypeError(f"it has returned a {kind.__qualname__}, which is no {_EXPECTED[around]}")
    # A block may be entered either way; an iterator is asked for items in one.
    names = sum(pairs, ()) if around == "with" else pairs[0]
    place = id(returned)
    found = _state.watched.get(place)
    try:
        if found is None or found.reference() is not returned:
            found = _Watched(weakref.ref(returned, lambda reference: _forget(place, reference)))
        subclass.give(returned, f"{around} {names[0]}", {name: _MAKERS[name] for name in names})
    except TypeError as error:
        interrupts.pass_on(error)
        raise TypeError(f"it has returned a {kind.__qualname__}, which can't be watched: {error}") from None
    found.calls[around, call.key] = _weakly(call)
    _state.watched[place] = found


def _forget(place: int, reference: object) -> None:
    found = _state.watched.get(place)
    if found is not None and found.reference is reference:
        del _state.watched[place]


def _weakly(call: Call) -> Callable[[], Call]:
    """Return a function that returns the call again, without arguments that nobody else has any more."""

    def hold(value: Any) -> Callable[[], Any]:
        try:
            return weakref.ref(value)
        except TypeError as error:
            interrupts.pass_on(error)
            return lambda: value

    key, function = call.key, call.function
    args, kwargs = [hold(value) for value in call.args], {name: hold(value) for name, value in call.kwargs.items()}
    return lambda: Call(key, function, tuple(get() for get in args), {name: get() for name, get in kwargs.items()})


def _calls(target: Any, around: str) -> list[Call]:
    """Return the calls that have returned an object, the hook first that goes around the others."""
    found = _state.watched.get(id(target))
    if found is None or found.reference() is not target or compiling():
        return []
    return [call() for (each, key), call in reversed(found.calls.items()) if each == around and not gates.gate(key)]


def _keep(target: Any, who: object, runs: Runs) -> None:
    if runs:
        _state.watched[id(target)].entered.setdefault(who, []).append(runs)


def _last(target: Any, who: object) -> Runs:
    """Return what a thread or task has entered last."""
    found = _state.watched.get(id(target))
    stack = found.entered.get(who) if found is not None else None
    if found is None or not stack:
        return []
    runs = stack.pop()
    if not stack:
        del found.entered[who]
    return runs


def _enter(kind: Any) -> Callable[..., Any]:
    def enter_block(self: Any) -> Any:
        runs = [enter(call) for call in _calls(self, "with")]
        try:
            value = kind.__enter__(self)
        except BaseException as error:
            leave(runs, Outcome(None, error))
            raise
        _keep(self, threading.get_ident(), runs)
        return value

    return enter_block


def _exit(kind: Any) -> Callable[..., Any]:
    def exit_block(self: Any, *raised: Any, **named: Any) -> Any:
        runs = _last(self, threading.get_ident())
        try:
            swallowed = kind.__exit__(self, *raised, **named)
        except BaseException as error:
            leave(runs, Outcome(None, error))
            raise
        leave(runs, Outcome(None, None if swallowed or len(raised) < 2 else raised[1]))
        return swallowed

    return exit_block


def _aenter(kind: Any) -> Callable[..., Any]:
    async def enter_block(self: Any) -> Any:
        runs = [await enter_coroutine(call) for call in _calls(self, "with")]
        try:
            value = await kind.__aenter__(self)
        except BaseException as error:
            await leave_coroutine(runs, Outcome(None, error))
            raise
        _keep(self, asyncio.current_task(), runs)
        return value

    return enter_block


def _aexit(kind: Any) -> Callable[..., Any]:
    async def exit_block(self: Any, *raised: Any, **named: Any) -> Any:
        runs = _last(self, asyncio.current_task())
        try:
            swallowed = await kind.__aexit__(self, *raised, **named)
        except BaseException as error:
            await leave_coroutine(runs, Outcome(None, error))
            raise
        await leave_coroutine(runs, Outcome(None, None if swallowed or len(raised) < 2 else raised[1]))
        return swallowed

    return exit_block


def _next(kind: Any) -> Callable[..., Any]:
    return lambda self: within([enter(call) for call in _calls(self, "next")], kind.__next__, self)


def _anext(kind: Any) -> Callable[..., Any]:
    async def next_item(self: Any) -> Any:
        return await within_coroutine(
            [await enter_coroutine(call) for call in _calls(self, "next")], kind.__anext__, self
        )

    return next_item


def _iterate(name: str) -> subclass.Maker:
    def of(kind: Any) -> Callable[..., Any]:
        def iterate(self: Any) -> Any:
            iterator = getattr(kind, name)(self)
            for call in reversed(_calls(self, "next")):
                iterator = watch(call.key, call.function, call.args, call.kwargs, iterator, "next")
            return iterator

        return iterate

    return of


_GENERATORS: dict[type, Callable[[Call, Any], Any]] = {
    types.GeneratorType: generate,
    types.AsyncGeneratorType: agenerate,
}
_EXPECTED = {"with": "context manager", "next": "iterator"}
_METHODS: dict[str, list[tuple[str, ...]]] = {
    "with": [("__enter__", "__exit__"), ("__aenter__", "__aexit__")],
    "next": [("__next__",), ("__anext__",), ("__iter__",), ("__aiter__",)],
}
_MAKERS: dict[str, subclass.Maker] = {
    "__enter__": _enter,
    "__exit__": _exit,
    "__aenter__": _aenter,
    "__aexit__": _aexit,
    "__next__": _next,
    "__anext__": _anext,
    "__iter__": _iterate("__iter__"),
    "__aiter__": _iterate("__aiter__"),
}
