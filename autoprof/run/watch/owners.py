"""Spans that a stack or a chain of coroutines works on, found in autoprof's own frames: they hold the behaviours of
hooks, whose generators hold spans.

A frame of the user's is never asked for its locals: up to Python 3.12 they are a copy that stays with the frame. The
copy for a frame of autoprof's keeps nothing alive that the frame itself does not.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

from autoprof.run.span import Span

# The folder of the package, as its code names it, and a wrapper's file where it has come from another machine.
_HERE = "run/watch/owners.py"
OWN = sys._getframe().f_code.co_filename.removesuffix(_HERE)
_WRAPPER = "/autoprof/hooks/wrapper.py"
# Whose functions stand around the user's.
_AROUND = f"{OWN}hooks/"
# The functions that drive a behaviour around a call, with the variable that holds it, or several.
_DRIVERS = {
    (f"{OWN}hooks/dispatch.py", "drive"): "run",
    (f"{OWN}hooks/dispatch.py", "drive_coroutine"): "run",
    (f"{OWN}hooks/items.py", "within"): "runs",
    (f"{OWN}hooks/items.py", "within_coroutine"): "runs",
}
# Variables of theirs that go before the frame does: an exception would hold itself.
_PASSING = ("error", "traceback", "result")


def is_own(code: CodeType) -> bool:
    """Return whether code is autoprof's."""
    return code.co_filename.startswith(OWN) or (
        code.co_name == "autoprof_wrapper" and code.co_filename.endswith(_WRAPPER)
    )


def is_around(code: CodeType) -> bool:
    """Return whether code is autoprof's and stands around a hooked function; its other code does work of its own."""
    return is_own(code) and not (code.co_filename.startswith(OWN) and not code.co_filename.startswith(_AROUND))


def in_frame(frame: FrameType) -> list[Span]:
    """Return the spans of a frame that may be running."""
    name = _DRIVERS.get((frame.f_code.co_filename, frame.f_code.co_name))
    if name is None:
        return []
    if sys.version_info >= (3, 13):
        return list(_of(frame.f_locals.get(name)))
    # A trace function of the user's may be at work with the copy that Python makes.
    if frame.f_trace is not None:
        return []
    local = frame.f_locals
    found = local.get(name)
    for passing in _PASSING:
        local.pop(passing, None)
    return list(_of(found))


def in_awaited(awaited: Any, code: CodeType, frame: FrameType | None) -> list[Span]:
    """Return the spans of a coroutine or a generator: by what it refers to, without a copy, if it is suspended."""
    if (code.co_filename, code.co_name) not in _DRIVERS:
        return []
    found = [span for value in _referred(awaited, frame) for span in _of(value)]
    return found if found or frame is None else in_frame(frame)


def _of(value: Any) -> Iterator[Span]:
    """Yield the spans of a behaviour that is being driven, or of several."""
    if type(value) is list:
        for each in value[:]:
            if type(each) is not list:
                yield from _of(each)
        return
    if type(value).__module__ != "autoprof.hooks.dispatch":
        return
    around = getattr(value, "_around", None)
    if around is None:
        return
    for each in _referred(around, around.gi_frame):
        kind = type(each)
        if kind is Span:
            yield each
        elif kind.__module__.startswith("autoprof.") and type(span := getattr(each, "_span", None)) is Span:
            yield span


def _referred(generator: Any, frame: FrameType | None) -> list[Any]:
    """Return what a suspended generator or coroutine has in its variables, among others."""
    # Up to Python 3.10 its frame has them.
    return gc.get_referents(generator) if sys.version_info >= (3, 11) else gc.get_referents(generator, frame)
