"""Hooks around values that functions return: context managers, iterators and generators.

A generator is wrapped by another generator. Other objects get a subclass of their class that has the special methods,
because Python looks these up in the class; identity, attributes, `isinstance` and pickling stay as they were.
"""

from __future__ import annotations

import abc
import asyncio
import functools
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from autoprof.base import exceptions, interrupts, process
from autoprof.base.originals import threading
from autoprof.hooks import gates
from autoprof.hooks.behaviour import Call, Outcome
from autoprof.hooks.dispatch import (
    Runs,
    compiling,
    enter,
    enter_coroutine,
    leave_item,
    leave_item_coroutine,
    within,
    within_coroutine,
)
from autoprof.run import runtime

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator

    from autoprof.hooks.behaviour import Call


# Makes a method of a subclass, from the class.
Maker: TypeAlias = Callable[[type], Callable[..., Any]]

# To set an object's class, whatever its class makes of attributes.
_CLASS: Any = object.__dict__["__class__"]
# Their `__init_subclass__` does nothing that others could see.
_HARMLESS = ("builtins", "typing", "typing_extensions")

_made: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()
# Those made last are kept for the next object of the same class, but not all: a program may make classes without end.
_latest: deque[type] = deque(maxlen=64)


def give_methods(target: Any, what: str, makers: Mapping[str, Maker]) -> None:
    """Give an object those of these methods that its class has; `what` names the set of them.

    Raises:
        TypeError: Its class is Python's own, or making a subclass of it could run the user's code.
    """
    kind = type(target)
    if _made.get(kind) != what:
        known = (each for each in type.__subclasses__(kind) if _made.get(each) == what)
        _CLASS.__set__(target, next(known, None) or _subclass(kind, what, makers))


def _subclass(kind: type, what: str, makers: Mapping[str, Maker]) -> type:
    defines = next(base for base in kind.__mro__ if "__init_subclass__" in vars(base))
    if type(kind) not in (type, abc.ABCMeta) or defines.__module__ not in _HARMLESS:
        raise TypeError(f"{kind.__qualname__} makes its subclasses in a way of its own")
    if not kind.__flags__ & _HEAP_TYPE:
        raise TypeError(f"{kind.__qualname__} is a class of Python's own, or of C")
    content: dict[str, Any] = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__slots__": ()}
    content |= {"__doc__": kind.__doc__, "__class__": property(lambda self: kind), "__reduce_ex__": _reduce(kind)}
    content |= {name: maker(kind) for name, maker in makers.items() if hasattr(kind, name)}
    made = type(kind)(kind.__name__, (kind,), content)
    _made[made] = what
    _latest.append(made)
    return made


def _reduce(kind: Any) -> Callable[..., Any]:
    def reduce_ex(self: Any, protocol: Any) -> Any:
        reduced = kind.__reduce_ex__(self, protocol)
        if not isinstance(reduced, tuple):
            return reduced
        function, arguments, *rest = reduced
        return (function, tuple(kind if each is type(self) else each for each in arguments), *rest)

    return reduce_ex


# Py_TPFLAGS_HEAPTYPE
_HEAP_TYPE = 1 << 9


def wrap_generator(function: Callable[..., Any], key: str, made: Call | None = None) -> Callable[..., Any]:
    """Put the hook called `key` around each item of a generator function; `made` is the call, if there is one."""

    @functools.wraps(function)
    def autoprof_wrapper(*args: Any, **kwargs: Any) -> Any:
        inner = function(*args, **kwargs)
        call = made
        try:
            from autoprof.hooks.behaviour import Call
            from autoprof.hooks.dispatch import advance
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


def wrap_async_generator(function: Callable[..., Any], key: str, made: Call | None = None) -> Callable[..., Any]:
    """Put the hook called `key` around each item of an asynchronous generator function."""

    @functools.wraps(function)
    async def autoprof_wrapper(*args: Any, **kwargs: Any) -> Any:
        inner = function(*args, **kwargs)
        call = made
        try:
            from autoprof.hooks.behaviour import Call
            from autoprof.hooks.dispatch import advance_coroutine
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
    return wrap_generator(lambda: inner, call.key, call)()


def agenerate(call: Call, inner: AsyncGenerator[Any, Any]) -> Any:
    """Return an asynchronous generator around one that a call has returned."""
    return wrap_async_generator(lambda: inner, call.key, call)()


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
        give_methods(returned, f"{around} {names[0]}", {name: _MAKERS[name] for name in names})
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
            leave_item(runs, Outcome(None, error))
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
            leave_item(runs, Outcome(None, error))
            raise
        leave_item(runs, Outcome(None, None if swallowed or len(raised) < 2 else raised[1]))
        return swallowed

    return exit_block


def _aenter(kind: Any) -> Callable[..., Any]:
    async def enter_block(self: Any) -> Any:
        runs = [await enter_coroutine(call) for call in _calls(self, "with")]
        try:
            value = await kind.__aenter__(self)
        except BaseException as error:
            await leave_item_coroutine(runs, Outcome(None, error))
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
            await leave_item_coroutine(runs, Outcome(None, error))
            raise
        await leave_item_coroutine(runs, Outcome(None, None if swallowed or len(raised) < 2 else raised[1]))
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


def _iterate(name: str) -> Maker:
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
_MAKERS: dict[str, Maker] = {
    "__enter__": _enter,
    "__exit__": _exit,
    "__aenter__": _aenter,
    "__aexit__": _aexit,
    "__next__": _next,
    "__anext__": _anext,
    "__iter__": _iterate("__iter__"),
    "__aiter__": _iterate("__aiter__"),
}
