"""Hooks around values that functions return: context managers, iterators and generators.

A generator is wrapped by another generator. Other objects get a subclass of their class that has the special methods,
because Python looks these up in the class; identity, attributes, `isinstance` and pickling stay as they were. A proxy
would differ from the object: Lightning makes a loader for a distributed run by `type(loader)(...)`, and a
`wrapt.ObjectProxy` has `__len__` and `__iter__` even if its object lacks them.
"""

from __future__ import annotations

import abc
import asyncio
import functools
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeAlias

from autoprof.base import exceptions, process, seam
from autoprof.base.originals import threading
from autoprof.hooks import registry
from autoprof.hooks.behaviour import Call, Outcome
from autoprof.hooks.dispatch import HookCall, compiling, drive, drive_coroutine, report

# Function that creates a method of the subclass, from the class.
Maker: TypeAlias = Callable[[type], Callable[..., Any]]


def wrap_generator(function: Callable[..., Any], key: str, returning_call: Call | None = None) -> Callable[..., Any]:
    """Put the hook `key` around each item of a generator function.

    Args:
        function: Generator function.
        key: Key of the hook.
        returning_call: Call that the behaviour gets; None for each call of the wrapper itself.
    """

    @functools.wraps(function)
    def autoprof_wrapper(*args: Any, **kwargs: Any) -> Any:
        inner = function(*args, **kwargs)
        call = returning_call
        try:
            from autoprof.hooks.behaviour import Call
            from autoprof.hooks.dispatch import advance
        except Exception as error:
            if (seam := sys.modules.get("autoprof.base.seam")) is not None:
                seam.pass_on(error)
        else:
            call = call or Call(key, function, args, kwargs)
        resume, value = inner.send, None
        while True:
            try:
                item = resume(value) if call is None else advance(call, resume, value)
            except StopIteration as end:
                return end.value
            finally:
                value = None  # a thrown exception would hold this frame, and the frame the exception
            try:
                value = yield item
                resume = inner.send
            except BaseException as error:
                resume, value = inner.throw, error

    return autoprof_wrapper


def wrap_async_generator(
    function: Callable[..., Any], key: str, returning_call: Call | None = None
) -> Callable[..., Any]:
    """Put the hook `key` around each item of an asynchronous generator function, as `wrap_generator` does."""

    @functools.wraps(function)
    async def autoprof_wrapper(*args: Any, **kwargs: Any) -> Any:
        inner = function(*args, **kwargs)
        call = returning_call
        try:
            from autoprof.hooks.behaviour import Call
            from autoprof.hooks.dispatch import advance_coroutine
        except Exception as error:
            if (seam := sys.modules.get("autoprof.base.seam")) is not None:
                seam.pass_on(error)
        else:
            call = call or Call(key, function, args, kwargs)
        resume, value = inner.asend, None
        while True:
            try:
                item = await (resume(value) if call is None else advance_coroutine(call, resume, value))
            except StopAsyncIteration:
                return
            finally:
                value = None
            try:
                value = yield item
                resume = inner.asend
            except BaseException as error:
                resume, value = inner.athrow, error

    return autoprof_wrapper


class _WatchedObject:
    """An object that hooked functions returned, the latest call of each hook, and its open `with` blocks.

    It keeps no arguments of the calls alive: they may hold a model, or the object itself.

    Attributes:
        reference: Weak reference to the object.
        calls: Functions that return the latest call, by extent (`with` or `next`) and hook.
        entered: Hooks of the open blocks, innermost last, by thread id or asyncio task.
    """

    def __init__(self, reference: weakref.ref[Any]) -> None:
        self.reference = reference
        self.calls: dict[tuple[str, str], Callable[[], Call]] = {}
        self.entered: dict[object, list[_BlockHooks]] = {}


class _ReturnedState(process.State):
    """Watched objects, by their ids."""

    def begin(self) -> None:
        self.watched: dict[int, _WatchedObject] = {}


_state = _ReturnedState()


def watch(
    key: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], returned: Any, around: str
) -> Any:
    """Put the hook `key` around the `with` blocks or each `next` of a call's result.

    Args:
        key: Key of the hook.
        function: Function that was called.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        returned: Result of the call.
        around: `with` or `next`.

    Returns:
        The result itself; for a generator, another generator that wraps it.
    """
    if compiling():
        return returned
    with seam.guard(key, _report):
        call = Call(key, function, args, kwargs)
        wrap = _GENERATORS.get(type(returned)) if around == "next" else None
        if wrap is not None:
            wrapped = wrap(lambda: returned, key, call)()
            wrapped.__name__, wrapped.__qualname__ = returned.__name__, returned.__qualname__
            return wrapped
        _watch(call, returned, around)
    return returned


def _report(key: str, error: BaseException) -> None:
    report(key, error)
    exceptions.set_traceback(error, None)  # as in dispatch


def _watch(call: Call, returned: Any, around: str) -> None:
    kind, number = type(returned), id(returned)
    if not _method_names(kind, around):
        raise TypeError(f"it returned a {kind.__qualname__}, which is not {_EXPECTED[around]}")
    watched = _state.watched.get(number)
    try:
        if watched is None or watched.reference() is not returned:
            watched = _WatchedObject(weakref.ref(returned, lambda reference: _forget(number, reference)))
        _give_methods(returned)
    except TypeError as error:
        seam.pass_on(error)
        raise TypeError(f"it returned a {kind.__qualname__}, which can't have hooks: {error}") from None
    watched.calls[around, call.key] = _weak_call(call)
    _state.watched[number] = watched


def _forget(number: int, reference: object) -> None:
    watched = _state.watched.get(number)
    if watched is not None and watched.reference is reference:
        del _state.watched[number]
        for hooks in [hooks for stack in watched.entered.values() for hooks in reversed(stack)]:
            hooks.abort()


def _weak_call(call: Call) -> Callable[[], Call]:
    """Return a function that recreates the call from weak references: a deleted argument becomes None."""

    def hold(value: Any) -> Callable[[], Any]:
        try:
            return weakref.ref(value)
        except TypeError as error:
            seam.pass_on(error)
            return lambda: value

    key, function = call.key, call.function
    args, kwargs = [hold(value) for value in call.args], {name: hold(value) for name, value in call.kwargs.items()}
    return lambda: Call(key, function, tuple(get() for get in args), {name: get() for name, get in kwargs.items()})


def _calls(target: Any, around: str) -> list[Call]:
    """Return the calls that returned an object, outermost hook first."""
    watched = _state.watched.get(id(target))
    if watched is None or watched.reference() is not target or compiling():
        return []
    return [
        call() for (extent, key), call in reversed(watched.calls.items()) if extent == around and not registry.gate(key)
    ]


class _BlockHooks:
    """Hooks around one `with` block of an object, outermost first.

    As a context manager, it surrounds the part of the block in which the object's method is called. If that raises, it
    leaves the hooks.
    """

    def __init__(self, calls: list[Call]) -> None:
        self._calls = calls
        self._entered: list[HookCall] = []

    def enter(self) -> None:
        """Enter the hooks."""
        for call in self._calls:
            self._entered.append(HookCall.of(call))
            self._entered[-1].proceed()

    async def enter_coroutine(self) -> None:
        """Enter the hooks, in a coroutine."""
        for call in self._calls:
            self._entered.append(HookCall.of(call))
            await self._entered[-1].proceed_coroutine()

    def leave(self, error: BaseException | None) -> None:
        """Leave the hooks, innermost first. `error` is the exception that left the block, if any."""
        traceback = exceptions.traceback_of(error) if error is not None else None
        try:
            while self._entered:
                self._entered.pop().proceed(Outcome(None, error))
        finally:
            self.abort()
            if error is not None:
                exceptions.set_traceback(error, traceback)
            del traceback

    async def leave_coroutine(self, error: BaseException | None) -> None:
        """Leave the hooks, in a coroutine."""
        traceback = exceptions.traceback_of(error) if error is not None else None
        try:
            while self._entered:
                await self._entered.pop().proceed_coroutine(Outcome(None, error))
        finally:
            self.abort()
            if error is not None:
                exceptions.set_traceback(error, traceback)
            del traceback

    @property
    def any(self) -> bool:
        """Return whether a hook has been entered."""
        return bool(self._entered)

    def abort(self) -> None:
        """End the hooks that are still entered, after an interrupt or because their object is gone."""
        while self._entered:
            self._entered.pop().abort(GeneratorExit())

    def __enter__(self) -> _BlockHooks:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: TracebackType | None) -> None:
        if error is not None:
            self.leave(error)

    async def __aenter__(self) -> _BlockHooks:
        return self

    async def __aexit__(self, kind: Any, error: BaseException | None, traceback: TracebackType | None) -> None:
        if error is not None:
            await self.leave_coroutine(error)


def _push(target: Any, owner: object, hooks: _BlockHooks) -> None:
    if hooks.any:
        _state.watched[id(target)].entered.setdefault(owner, []).append(hooks)


def _pop(target: Any, owner: object) -> _BlockHooks:
    """Return the hooks of the block that a thread or task entered last."""
    watched = _state.watched.get(id(target))
    stack = watched.entered.pop(owner, []) if watched is not None else []
    if watched is not None and len(stack) > 1:
        watched.entered[owner] = stack[:-1]
    return stack[-1] if stack else _BlockHooks([])


def _enter(kind: Any) -> Callable[..., Any]:
    def enter_block(self: Any) -> Any:
        with _BlockHooks(_calls(self, "with")) as hooks:
            hooks.enter()
            value = kind.__enter__(self)
            _push(self, threading.get_ident(), hooks)
        return value

    return enter_block


def _exit(kind: Any) -> Callable[..., Any]:
    def exit_block(self: Any, *raised: Any, **named: Any) -> Any:
        with _pop(self, threading.get_ident()) as hooks:
            swallowed = kind.__exit__(self, *raised, **named)
            hooks.leave(None if swallowed or len(raised) < 2 else raised[1])
        return swallowed

    return exit_block


def _aenter(kind: Any) -> Callable[..., Any]:
    async def enter_block(self: Any) -> Any:
        async with _BlockHooks(_calls(self, "with")) as hooks:
            await hooks.enter_coroutine()
            value = await kind.__aenter__(self)
            _push(self, asyncio.current_task(), hooks)
        return value

    return enter_block


def _aexit(kind: Any) -> Callable[..., Any]:
    async def exit_block(self: Any, *raised: Any, **named: Any) -> Any:
        async with _pop(self, asyncio.current_task()) as hooks:
            swallowed = await kind.__aexit__(self, *raised, **named)
            await hooks.leave_coroutine(None if swallowed or len(raised) < 2 else raised[1])
        return swallowed

    return exit_block


def _next(kind: Any) -> Callable[..., Any]:
    def next_item(self: Any) -> Any:
        resume = functools.partial(kind.__next__, self)
        for call in reversed(_calls(self, "next")):
            resume = functools.partial(drive, call.key, resume, (), {}, call)
        return resume()

    return next_item


def _anext(kind: Any) -> Callable[..., Any]:
    async def next_item(self: Any) -> Any:
        resume = functools.partial(kind.__anext__, self)
        for call in reversed(_calls(self, "next")):
            resume = functools.partial(drive_coroutine, call.key, resume, (), {}, call)
        return await resume()

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


_GENERATORS = {types.GeneratorType: wrap_generator, types.AsyncGeneratorType: wrap_async_generator}
_EXPECTED = {"with": "a context manager", "next": "an iterator"}
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
# Descriptor that sets an object's class, even if that class overrides `__setattr__`.
_CLASS: Any = object.__dict__["__class__"]
# Modules whose `__init_subclass__` has no effect that the user could see.
_HARMLESS = ("builtins", "typing", "typing_extensions")
# Py_TPFLAGS_HEAPTYPE
_HEAP_TYPE = 1 << 9

_subclasses: weakref.WeakSet[type] = weakref.WeakSet()
# Latest subclasses, kept for the next object of the same class. Bounded, since a program may create endless classes.
_latest: deque[type] = deque(maxlen=64)


def _method_names(kind: type, around: str) -> tuple[str, ...]:
    """Return the methods of a class that a hook replaces; none if the class has no blocks or items."""
    pairs = [names for names in _METHODS[around] if all(hasattr(kind, name) for name in names)]
    # A block may be entered in both ways, `with` and `async with`. An iterator is used in one way only.
    return sum(pairs if around == "with" else pairs[:1], ())


def _give_methods(target: Any) -> None:
    """Replace the methods of one object for which `_MAKERS` has a function.

    Raises:
        TypeError: The object's class is not written in Python, or a subclass of it could run the user's code.
    """
    kind = type(target)
    if not any(base in _subclasses for base in kind.__mro__):
        subclasses = (subclass for subclass in type.__subclasses__(kind) if subclass in _subclasses)
        _CLASS.__set__(target, next(subclasses, None) or _subclass(kind))


def _subclass(kind: type) -> type:
    defines = next(base for base in kind.__mro__ if "__init_subclass__" in vars(base))
    if type(kind) not in (type, abc.ABCMeta) or defines.__module__ not in _HARMLESS:
        raise TypeError(f"{kind.__qualname__} has a metaclass or an __init_subclass__")
    if not kind.__flags__ & _HEAP_TYPE:
        raise TypeError(f"{kind.__qualname__} is built into Python or written in C")
    content: dict[str, Any] = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__slots__": ()}
    content |= {"__doc__": kind.__doc__, "__class__": property(lambda self: kind), "__reduce_ex__": _reduce(kind)}
    names = _method_names(kind, "with") + _method_names(kind, "next")
    subclass = type(kind)(kind.__name__, (kind,), content | {name: _MAKERS[name](kind) for name in names})
    _subclasses.add(subclass)
    _latest.append(subclass)
    return subclass


def _reduce(kind: Any) -> Callable[..., Any]:
    def reduce_ex(self: Any, protocol: Any) -> Any:
        reduced = kind.__reduce_ex__(self, protocol)
        if not isinstance(reduced, tuple):
            return reduced
        function, arguments, *state = reduced
        return (function, tuple(kind if argument is type(self) else argument for argument in arguments), *state)

    return reduce_ex
