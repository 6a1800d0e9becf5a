"""Hooks around objects that hooked functions return: context managers, iterators and generators.

A generator is wrapped in another generator. For any other object, autoprof replaces the object's class by a subclass
with new special methods (`__enter__`, `__next__`), because Python looks up special methods in the class. The identity,
the attributes, `isinstance` and the pickling of the object do not change.

A proxy of the object would cause errors. For example, Lightning makes a loader for a distributed run by
`type(loader)(...)`, and a `wrapt.ObjectProxy` has `__len__` and `__iter__` even if the object does not have them.
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

import msgspec

from autoprof.base import process, seam
from autoprof.base.originals import threading
from autoprof.hooks import registry
from autoprof.hooks.behaviour import Call, Outcome
from autoprof.hooks.dispatch import HookCall, drive, drive_coroutine, is_compiling, report

# Function that gets an object's class and returns a special method for the subclass.
Maker: TypeAlias = Callable[[type], Callable[..., Any]]


def wrap_generator(function: Callable[..., Any], key: str, returning_call: Call | None = None) -> Callable[..., Any]:
    """Return a wrapper of a generator function that puts the hook `key` around the work on each item.

    Args:
        function: Generator function.
        key: Key of the hook.
        returning_call: Call that the behaviour gets. If it is None, the behaviour gets the call of the wrapper.
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
                value = None  # otherwise a thrown exception and this frame would refer to each other
            try:
                value = yield item
                resume = inner.send
            except BaseException as error:
                resume, value = inner.throw, error

    return autoprof_wrapper


def wrap_async_generator(
    function: Callable[..., Any], key: str, returning_call: Call | None = None
) -> Callable[..., Any]:
    """Do the work of `wrap_generator` for an asynchronous generator function."""

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


class _WatchedObject(msgspec.Struct, eq=False):
    """An object that hooked functions have returned, the latest of these calls, and the object's open `with` blocks.

    It does not keep the arguments of the calls alive, because they may refer to a model or to the object itself.

    Attributes:
        reference: Weak reference to the object.
        calls: Dict from the extent (`with` or `next`) and the hook's key to a function that returns the latest call.
        entered: Dict from a thread id or an asyncio task to the hooks of its open blocks, innermost block last.
    """

    reference: weakref.ref[Any]
    calls: dict[tuple[str, str], Callable[[], Call]] = {}
    entered: dict[object, list[_BlockHooks]] = {}


class _ReturnedState(process.State):
    """The watched objects of this process, as a dict from the object's `id`."""

    def reset(self) -> None:
        self.watched: dict[int, _WatchedObject] = {}


_state = _ReturnedState()


def watch(
    key: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], returned: Any, around: str
) -> Any:
    """Put the hook `key` around the `with` blocks or around each `next` of a call's result.

    Args:
        key: Key of the hook.
        function: Function that was called.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        returned: Result of the call.
        around: `with` or `next`.

    Returns:
        The result itself. If the result is a generator: another generator that wraps it.
    """
    if is_compiling():
        return returned
    with seam.guard(key, _report_own_error):
        call = Call(key, function, args, kwargs)
        wrap = _GENERATORS.get(type(returned)) if around == "next" else None
        if wrap is not None:
            wrapped = wrap(lambda: returned, key, call)()
            wrapped.__name__, wrapped.__qualname__ = returned.__name__, returned.__qualname__
            return wrapped
        _watch(call, returned, around)
    return returned


def _report_own_error(key: str, error: BaseException) -> None:
    report(key, error)
    seam.set_traceback(error, None)  # for the reason in `HookCall._handle_own_error`


def _watch(call: Call, returned: Any, around: str) -> None:
    kind, object_id = type(returned), id(returned)
    if not _method_names(kind, around):
        raise TypeError(f"it returned a {kind.__qualname__}, which is not {_EXPECTED[around]}")
    watched_object = _state.watched.get(object_id)
    try:
        if watched_object is None or watched_object.reference() is not returned:
            watched_object = _WatchedObject(weakref.ref(returned, lambda reference: _forget(object_id, reference)))
        _give_methods(returned)
    except TypeError as error:
        seam.pass_on(error)
        raise TypeError(f"it returned a {kind.__qualname__}, which can't have hooks: {error}") from None
    watched_object.calls[around, call.key] = _weak_call(call)
    _state.watched[object_id] = watched_object


def _forget(object_id: int, reference: object) -> None:
    watched_object = _state.watched.get(object_id)
    if watched_object is not None and watched_object.reference is reference:
        del _state.watched[object_id]
        for hooks in [hooks for stack in watched_object.entered.values() for hooks in reversed(stack)]:
            hooks.abort()


def _weak_call(call: Call) -> Callable[[], Call]:
    """Return a function that recreates the call from weak references. If an argument was deleted, it becomes None."""

    def getter(value: Any) -> Callable[[], Any]:
        try:
            return weakref.ref(value)
        except TypeError as error:
            seam.pass_on(error)
            return lambda: value

    key, function = call.key, call.function
    args, kwargs = [getter(value) for value in call.args], {name: getter(value) for name, value in call.kwargs.items()}
    return lambda: Call(key, function, tuple(get() for get in args), {name: get() for name, get in kwargs.items()})


def _calls(target: Any, around: str) -> list[Call]:
    """Return the latest hooked calls that returned an object, outermost hook first.

    Args:
        target: The object.
        around: Only hooks with this extent are included: `with` or `next`.
    """
    watched_object = _state.watched.get(id(target))
    if watched_object is None or watched_object.reference() is not target or is_compiling():
        return []
    return [
        call()
        for (extent, key), call in reversed(watched_object.calls.items())
        if extent == around and not registry.gate(key)
    ]


class _BlockHooks:
    """The hooks around one `with` block of an object, outermost hook first.

    It is also a context manager, for the code that calls the object's own `__enter__` or `__exit__`. If this code
    raises an exception, the context manager exits the hooks.
    """

    def __init__(self, calls: list[Call]) -> None:
        self._calls = calls
        self._entered: list[HookCall] = []

    def enter(self) -> None:
        """Enter the hooks: run the part of each behaviour before the block."""
        for call in self._calls:
            self._entered.append(HookCall.of(call))
            self._entered[-1].proceed()

    async def enter_coroutine(self) -> None:
        """Do the work of `enter` in a coroutine."""
        for call in self._calls:
            self._entered.append(HookCall.of(call))
            await self._entered[-1].proceed_coroutine()

    def leave(self, error: BaseException | None) -> None:
        """Leave the hooks, innermost first: run the part of each behaviour after the block.

        Args:
            error: The exception that ended the block, or None.
        """
        traceback = seam.traceback_of(error) if error is not None else None
        try:
            while self._entered:
                self._entered.pop().proceed(Outcome(None, error))
        finally:
            self.abort()
            if error is not None:
                seam.set_traceback(error, traceback)
            del traceback

    async def leave_coroutine(self, error: BaseException | None) -> None:
        """Do the work of `leave` in a coroutine."""
        traceback = seam.traceback_of(error) if error is not None else None
        try:
            while self._entered:
                await self._entered.pop().proceed_coroutine(Outcome(None, error))
        finally:
            self.abort()
            if error is not None:
                seam.set_traceback(error, traceback)
            del traceback

    @property
    def any(self) -> bool:
        """Return True if a hook is entered and not left."""
        return bool(self._entered)

    def abort(self) -> None:
        """End the hooks that are still entered, after an interrupt or because the object was deleted."""
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


def _push_hooks(target: Any, owner: object, hooks: _BlockHooks) -> None:
    if hooks.any:
        _state.watched[id(target)].entered.setdefault(owner, []).append(hooks)


def _pop_hooks(target: Any, owner: object) -> _BlockHooks:
    """Remove and return the hooks of the block of an object that a thread or task has entered last.

    Args:
        target: The object.
        owner: The thread id or the task.
    """
    watched_object = _state.watched.get(id(target))
    stack = watched_object.entered.pop(owner, []) if watched_object is not None else []
    if watched_object is not None and len(stack) > 1:
        watched_object.entered[owner] = stack[:-1]
    return stack[-1] if stack else _BlockHooks([])


def _enter(kind: Any) -> Callable[..., Any]:
    def enter_block(self: Any) -> Any:
        with _BlockHooks(_calls(self, "with")) as hooks:
            hooks.enter()
            value = kind.__enter__(self)
            _push_hooks(self, threading.get_ident(), hooks)
        return value

    return enter_block


def _exit(kind: Any) -> Callable[..., Any]:
    def exit_block(self: Any, *raised: Any, **keywords: Any) -> Any:
        with _pop_hooks(self, threading.get_ident()) as hooks:
            swallowed = kind.__exit__(self, *raised, **keywords)
            hooks.leave(None if swallowed or len(raised) < 2 else raised[1])
        return swallowed

    return exit_block


def _aenter(kind: Any) -> Callable[..., Any]:
    async def enter_block(self: Any) -> Any:
        async with _BlockHooks(_calls(self, "with")) as hooks:
            await hooks.enter_coroutine()
            value = await kind.__aenter__(self)
            _push_hooks(self, asyncio.current_task(), hooks)
        return value

    return enter_block


def _aexit(kind: Any) -> Callable[..., Any]:
    async def exit_block(self: Any, *raised: Any, **keywords: Any) -> Any:
        async with _pop_hooks(self, asyncio.current_task()) as hooks:
            swallowed = await kind.__aexit__(self, *raised, **keywords)
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
# Descriptor with which autoprof replaces an object's class, even if the class overrides `__setattr__`.
_CLASS: Any = object.__dict__["__class__"]
# Modules whose classes have an `__init_subclass__` without an effect that the user could see.
_HARMLESS = ("builtins", "typing", "typing_extensions")
# Py_TPFLAGS_HEAPTYPE
_HEAP_TYPE = 1 << 9

_subclasses: weakref.WeakSet[type] = weakref.WeakSet()
# The latest subclasses, which are kept alive for the next object of the same class. The number is limited, because a
# program may create more and more classes.
_latest: deque[type] = deque(maxlen=64)


def _method_names(kind: type, around: str) -> tuple[str, ...]:
    """Return the names of the special methods of a class that a hook replaces.

    The result is empty if objects of the class can't be used in the way of the hook.

    Args:
        kind: The class.
        around: `with` or `next`.
    """
    name_groups = [names for names in _METHODS[around] if all(hasattr(kind, name) for name in names)]
    # A program may use one object both with `with` and with `async with`. It uses an iterator in one way only.
    return sum(name_groups if around == "with" else name_groups[:1], ())


def _give_methods(target: Any) -> None:
    """Replace the class of an object by a subclass with the special methods that `_MAKERS` makes.

    Raises:
        TypeError: The object's class is not written in Python, or the creation of a subclass could run the user's code.
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
