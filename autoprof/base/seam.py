"""Seam between autoprof's errors and the program's exceptions.

autoprof's own errors end at a `guard`. Guards are at the roots of autoprof's code: calls of hooks, threads, functions
that run at exit, callbacks. The code below a root catches the exceptions that it expects.

Python calls a signal handler between two instructions of the main thread. If the handler raises an exception, the
exception leaves the code that was running. This can be autoprof's code. For example, the handler of a watchdog's alarm
raises `TimeoutError`, which is an `OSError`. An `except OSError` clause of autoprof must not catch that exception.
Therefore every `except` clause of autoprof begins with `pass_on`. Standard library only.
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


# Flags of code objects, as in `inspect`: code of a function, and of a function with `*args`.
_OPTIMIZED, _VARARGS = 0x01, 0x04
# Maximum number of calls of `work` by `undo`. A call is interrupted if the user presses Ctrl-C once more.
_MAX_CALLS = 4
# Reason in meta files of captures that ended early.
AT_WORK = "autoprof was interrupted, or the stage was never left"


def pass_on(error: BaseException) -> None:
    """If `error` is an exception of a signal handler, or was caused by such an exception, raise that exception."""
    if (raised := of_handler(error)) is not None:
        raise raised


def of_user(error: BaseException) -> BaseException | None:
    """Return the exception that must reach the user's code, or None if `error` is an error of autoprof.

    Two kinds of exceptions that leave autoprof's code must reach the user's code: exceptions of signal handlers, and
    exceptions that are not an `Exception`, such as `KeyboardInterrupt`, `SystemExit` or a cancellation.
    """
    raised = of_handler(error)
    return raised if raised is not None or issubclass(type(error), Exception) else error


def undo(error: BaseException, work: Callable[[], None]) -> None:
    """Call `work` if `error` is an interrupt of the caller. `work` undoes the steps that the caller has done.

    A second signal may interrupt `work`, too. Then `work` is called again, and must continue where it was interrupted.

    Raises:
        BaseException: The last interrupt of `work`.
    """
    problem: BaseException | None = error
    last: BaseException | None = None
    try:
        for _ in range(_MAX_CALLS):
            try:
                # In this block and not in the clause below: this check takes long enough to be interrupted, too.
                if problem is not None and of_user(problem) is None:
                    # `log` imports this module.
                    if problem is not error and (log := sys.modules.get("autoprof.base.log")) is not None:
                        log.error_once("interrupted work could not be ended", problem)
                    return
                problem = None
                work()
                break
            except BaseException as raised:
                problem = last = raised
        if last is not None and (interrupt := of_user(last)) is not None:
            raise interrupt
    finally:
        problem = last = None


def alone(error: BaseException, outer: BaseException | None) -> None:
    """Remove autoprof's own exceptions from the contexts of an exception that interrupted autoprof's code.

    Args:
        error: Exception of a signal handler, or `KeyboardInterrupt`.
        outer: Exception that the user's code was handling when it called autoprof's code, or None.
    """
    if error is outer:
        return
    while (context := exceptions.context_of(error)) is not None and context is not outer:
        traceback = exceptions.traceback_of(context)
        if traceback is None or not _is_handler(traceback.tb_frame):
            exceptions.set_context(error, outer if outer is not error else None)
            return
        error = context


class guard:
    """Root of autoprof's code: an error of autoprof in the `with` block ends here and is reported.

    Exceptions that must reach the user's code pass (`of_user`).

    Args:
        what: The work of the block, for the report: `"the step can't be announced"`.
        report: Function of `what` and the error, such as `log.error_once`.

    Attributes:
        failed: True if an error ended here.
    """

    __slots__ = ("_report", "_what", "failed")

    def __init__(self, what: str, report: Callable[[str, BaseException], None]) -> None:
        self.failed = False
        self._what = what
        self._report = report

    def __enter__(self) -> guard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if error is None:
            return False
        if (user_error := of_user(error)) is not None:
            if user_error is error:
                return False
            raise user_error
        self.failed = True
        self._report(self._what, error)
        return True


class suppress:
    """Variant of `contextlib.suppress` that does not suppress exceptions of signal handlers."""

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
    """Return the exception that a signal handler raised, or None if no handler raised one.

    The exception is `error` itself, or is in its chain of contexts and causes. A context that was raised before
    autoprof's code was called does not count: the frame that caught it is not in the traceback of `error`.
    """
    frames: set[FrameType] = set()
    while error is not None:
        entries = list(_entries(exceptions.traceback_of(error)))
        # Python replaces the StopIteration of a generator by a RuntimeError without the generator's frame.
        if frames and (not entries or (entries[0] not in frames and not issubclass(type(error), StopIteration))):
            return None
        # The first frame is the frame that caught the exception.
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
    """Return True for the frame of a signal handler, whose arguments are a number and the interrupted frame."""
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
        local.clear()  # `f_locals` is a copy, which would keep the function's objects alive
    return any(frame is interrupted and isinstance(number, int) for number, frame in pairwise(values))


def _handlers() -> set[CodeType]:
    """Return the code of the installed signal handlers.

    The code identifies handlers that can't be identified by their arguments: a wrapper may call a handler with other
    arguments, or the handler may have overwritten its arguments.
    """
    # A process without functools has no partial.
    partial = getattr(sys.modules.get("functools"), "partial", ())
    codes = set()
    for number in range(1, _signal.NSIG):
        handler: object = _signal.getsignal(number)
        while isinstance(handler, partial):
            handler = handler.func
        if not callable(handler):
            continue
        for function in (handler, getattr(handler, "__func__", None), type(handler).__call__):
            if (code := getattr(function, "__code__", None)) is not None:
                codes.add(code)
    return codes
