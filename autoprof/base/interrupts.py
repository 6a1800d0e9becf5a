"""Exceptions that the user's signal handlers raise where autoprof's code was interrupted.

Python runs a handler between two instructions of the main thread, and what it raises comes out of whatever code was
running: `except Exception` would take a watchdog's alarm for an error of autoprof's. So every clause that catches
exceptions of such kinds in a run begins with `pass_on`. Standard library only.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` in C: it takes any number, and imports nothing
import sys
from itertools import pairwise

from autoprof.base import exceptions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import CodeType, FrameType, TracebackType


# As in `inspect`: the code of a function, and one with `*args`.
_OPTIMIZED, _VARARGS = 0x01, 0x04
# How often `undo` calls what is interrupted itself: somebody who wants out of it has pressed Ctrl-C as often.
_TIMES = 4
# Why something has ended early, in words.
AT_WORK = "autoprof was interrupted at its work"


def pass_on(error: BaseException) -> None:
    """Raise what a signal handler raised, if that is what `error` is or was caused by."""
    if (theirs := of_handler(error)) is not None:
        raise theirs


def of_user(error: BaseException) -> BaseException | None:
    """Return what belongs to the user of an exception that comes out of autoprof's code, or None.

    That is what a signal handler raised, and what is no `Exception`: `KeyboardInterrupt`, `SystemExit`, a cancellation.
    """
    theirs = of_handler(error)
    return theirs if theirs is not None or issubclass(type(error), Exception) else error


def undo(error: BaseException, work: Callable[[], None]) -> None:
    """Call `work` if `error` interrupted the caller: it ends what the caller has begun.

    A second signal may interrupt that, too. So it is called again, and then begins with what is left to do.

    Raises:
        BaseException: What interrupted it last.
    """
    came: BaseException | None = error
    last: BaseException | None = None
    try:
        for _ in range(_TIMES):
            try:
                # Here, and not where it was caught: this takes long enough to be interrupted, too.
                if came is not None and of_user(came) is None:
                    # `log` imports this module.
                    if came is not error and (log := sys.modules.get("autoprof.base.log")) is not None:
                        log.error_once("what was interrupted could not be ended", came)
                    return
                came = None
                work()
                break
            except BaseException as raised:
                came = last = raised
        if last is not None and (theirs := of_user(last)) is not None:
            raise theirs
    finally:
        came = last = None


def alone(error: BaseException, outer: BaseException | None) -> None:
    """Take autoprof's own exceptions out of the contexts of one that interrupted autoprof's code.

    Args:
        error: What a signal handler raised, or a signal.
        outer: What the user was handling when autoprof's code was called.
    """
    if error is outer:
        return
    while (context := exceptions.context_of(error)) is not None and context is not outer:
        begins = exceptions.traceback_of(context)
        if begins is None or not _is_handler(begins.tb_frame):
            exceptions.set_context(error, outer if outer is not error else None)
            return
        error = context


class suppress:
    """`contextlib.suppress`, but for what signal handlers raise."""

    def __init__(self, *kinds: type[BaseException]) -> None:
        self._kinds = kinds

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if kind is None or error is None or not issubclass(kind, self._kinds):
            return False
        pass_on(error)
        return True


def of_handler(error: BaseException | None) -> BaseException | None:
    """Return the exception that a signal handler raised: `error`, or one that was caught on its way; or None.

    What was raised before autoprof's code was called may be the context of `error`, too, and is not meant: nobody
    caught it in a frame that `error` has come through.
    """
    frames: set[FrameType] = set()
    while error is not None:
        entries = list(_entries(exceptions.traceback_of(error)))
        # A generator's frame is not in the traceback of the RuntimeError that stands for its StopIteration.
        if frames and (not entries or (entries[0] not in frames and not issubclass(type(error), StopIteration))):
            return None
        # The first frame is that which caught it.
        if any(map(_is_handler, entries[1:])):
            return error
        if frames.issuperset(entries):
            return None
        frames.update(entries)
        cause = exceptions.cause_of(error)
        error = exceptions.context_of(error) if cause is None else cause
    return None


def _entries(traceback: TracebackType | None) -> Iterator[FrameType]:
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next


def _is_handler(frame: FrameType) -> bool:
    """Return whether a frame is that of a signal handler: called with a number and the frame that it interrupts."""
    code, interrupted = frame.f_code, frame.f_back
    if code in _handlers():
        return True
    names = code.co_varnames[: code.co_argcount]
    if code.co_flags & _VARARGS:
        names += (code.co_varnames[code.co_argcount + code.co_kwonlyargcount],)
    if interrupted is None or not names or not code.co_flags & _OPTIMIZED:
        return False
    local = frame.f_locals
    values: list[object] = []
    for name in names:
        value = local.get(name)
        values.extend(value if isinstance(value, tuple) else (value,))
    if sys.version_info < (3, 13):
        local.clear()  # a copy, which would keep alive what the function had
    return any(given is interrupted and isinstance(number, int) for number, given in pairwise(values))


def _handlers() -> set[CodeType]:
    """Return the code of the installed handlers: for one that is called otherwise, or has dropped its arguments."""
    # A partial exists only where functools is imported.
    partial = getattr(sys.modules.get("functools"), "partial", ())
    codes = set()
    for number in range(1, _signal.NSIG):
        handler: object = _signal.getsignal(number)
        while isinstance(handler, partial):
            handler = handler.func
        if not callable(handler):
            continue
        for found in (handler, getattr(handler, "__func__", None), type(handler).__call__):
            if (code := getattr(found, "__code__", None)) is not None:
                codes.add(code)
    return codes
