"""Ranges (`record_function`) that are open when a recording ends.

The end of a range writes into the recording in which the range began. If that recording has ended and another one is
on, the write goes to freed memory, and the process crashes or hangs (torch 2.13, `onFunctionExit` in
torch/csrc/autograd/profiler_kineto.cpp). If a range ends twice, its second end does nothing. So autoprof ends all open
ranges before its own recording ends. It also does so before it records after a profiler of the program.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable
from types import FunctionType
from typing import Any

from autoprof.base import process


class _RangesState(process.State):
    """Ranges of autoprof's recording.

    Attributes:
        entered: Handles of the ranges that began in it, in their order. torch ends the range of a handle that is freed.
        enter: The wrapper of `record_function.__enter__`, and the method that it wraps.
    """

    def begin(self) -> None:
        self.entered: OrderedDict[int, weakref.ref[Any]] = OrderedDict()
        self.enter: tuple[Callable[[Any], Any], Callable[[Any], Any]] | None = None


_state = _RangesState()


def begin() -> None:
    """Note the ranges that begin from now on."""
    end()
    original = vars(_class()).get("__enter__")
    if isinstance(original, FunctionType):  # it may be a mock of the program
        wrapper = _noting(original)
        _class().__enter__ = wrapper
        _state.enter = wrapper, original


def note(handle: Any) -> None:
    """Note a range that has begun. `handle` is what torch returned for it."""
    key = id(handle)
    # First noted, then moved, so that an interrupt between the two loses no range.
    _state.entered[key] = weakref.ref(handle)
    _state.entered.move_to_end(key)


def end() -> None:
    """End the noted ranges, the last one first, and note no more."""
    patched, _state.enter = _state.enter, None
    if patched is not None and vars(_class()).get("__enter__") is patched[0]:
        _class().__enter__ = patched[1]
    while _state.entered:
        _end(_state.entered.popitem()[1]())


def end_all() -> None:
    """End all open ranges of the process, also ranges that began under a profiler of the program.

    autoprof has not noted the latter, so this looks at all objects of the process (0.1 s per million).
    """
    record_function = _class()
    for candidate in gc.get_objects():
        if issubclass(type(candidate), record_function):
            _end(getattr(candidate, "record", None))


def _class() -> Any:
    from torch.autograd.profiler import record_function

    return record_function


def _end(handle: Any) -> None:
    import torch

    if type(handle) is torch.ScriptObject:
        # It calls no operator, unlike `record_function.__exit__`: the program's dispatch modes would see that.
        torch.autograd._record_function_with_args_exit(handle)


def _noting(enter: Callable[[Any], Any]) -> Callable[[Any], Any]:
    import torch

    enabled, kind, handle_type = torch.autograd._profiler_enabled, torch._C._autograd._profiler_type, torch.ScriptObject
    kineto = torch._C._profiler.ActiveProfilerType.KINETO

    @functools.wraps(enter)
    def __enter__(self: Any) -> Any:
        entered = enter(self)
        if enabled() and kind() == kineto:
            handle = getattr(self, "record", None)
            if type(handle) is handle_type:
                note(handle)
        return entered

    return __enter__
