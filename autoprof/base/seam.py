"""Seam between autoprof and the program's exceptions and signals.

autoprof's own errors end at a `guard`. Guards are at the roots of autoprof's code: calls of hooks, threads, functions
that run at exit, callbacks. The code below a root catches the exceptions that it expects.

Python calls a signal handler between two instructions of the main thread. If the handler raises an exception, the
exception leaves the code that was running. This can be autoprof's code. For example, the handler of a watchdog's alarm
raises `TimeoutError`, which is an `OSError`. An `except OSError` clause of autoprof must not catch that exception.
Therefore every `except` clause of autoprof begins with `pass_on`.

A class of exceptions may define properties, slots, `__str__`, `__setattr__`, `__getattribute__`, `__bool__` or a
metaclass. autoprof reads, changes and describes the program's exceptions without running such code: it uses the
descriptors of `BaseException` and `type`, as the interpreter does.

The boot uses this module if an error occurs, also if a program has replaced `os`. So the module imports only the
standard library, not the copies in `base/originals.py`.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` in C: it takes any number, and imports nothing
import sys
import types
from itertools import pairwise
from types import FunctionType, MemberDescriptorType, MethodDescriptorType, WrapperDescriptorType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import CodeType, FrameType, TracebackType
    from typing import Any, TypeVar

    _T = TypeVar("_T")
    Link = Callable[[BaseException], "BaseException | None"]

# Flags of code objects, as in `inspect`: code of a function, and of a function with `*args`.
_OPTIMIZED, _VARARGS = 0x01, 0x04
# Maximum number of calls of `work` by `undo`. A call is interrupted if the user presses Ctrl-C once more.
_MAX_CALLS = 4
# Reason in meta files of captures that ended early.
AT_WORK = "autoprof was interrupted, or the stage was never left"

# Name of the class of exception groups, which Python 3.10 lacks.
GROUP = "BaseExceptionGroup"

name_of: Callable[[type], str] = type.__dict__["__name__"].__get__
mro_of: Callable[[type], tuple[type, ...]] = type.__dict__["__mro__"].__get__
members_of: Callable[[type], dict[str, Any]] = type.__dict__["__dict__"].__get__
_attributes_of: Callable[[Any], dict[str, Any]] = BaseException.__dict__["__dict__"].__get__
args_of: Callable[[BaseException], tuple[Any, ...]] = BaseException.__dict__["args"].__get__

traceback_of: Callable[[BaseException], TracebackType | None] = BaseException.__dict__["__traceback__"].__get__
context_of: Link = BaseException.__dict__["__context__"].__get__
cause_of: Link = BaseException.__dict__["__cause__"].__get__
hides_context: Callable[[BaseException], bool] = BaseException.__dict__["__suppress_context__"].__get__
set_traceback: Callable[[BaseException, TracebackType | None], BaseException] = BaseException.with_traceback
set_context: Callable[[BaseException, BaseException | None], None] = BaseException.__dict__["__context__"].__set__

# Code in these folders does not belong to the program: the standard library, autoprof, installed packages.
_LIBRARIES = tuple(path.rpartition("/")[0] + "/" for path in (types.__file__, __file__.rpartition("/")[0]))
_PACKAGES = ("/site-packages/", "/dist-packages/")
_ATOMS = frozenset((str, bytes, int, float, complex, bool, type(None)))
_CONTAINERS = frozenset((tuple, list, set, frozenset, dict))
# Classes whose `__str__` shows attributes, which may be objects of the program (Objects/exceptions.c).
_SHOW_MEMBERS = (OSError, SyntaxError, ImportError, UnicodeEncodeError, UnicodeDecodeError, UnicodeTranslateError)
# Containers at a greater depth are not shown, because a container may contain itself.
_MAX_DEPTH = 5


def pass_on(error: BaseException) -> None:
    """If `error` is an exception of a signal handler, or was caused by such an exception, raise that exception."""
    if (raised := error_of_handler(error)) is not None:
        raise raised


def error_for_user(error: BaseException) -> BaseException | None:
    """Return the exception that must reach the user's code, or None if `error` is an error of autoprof.

    Two kinds of exceptions that leave autoprof's code must reach the user's code: exceptions of signal handlers, and
    exceptions that are not an `Exception`, such as `KeyboardInterrupt`, `SystemExit` or a cancellation.
    """
    raised = error_of_handler(error)
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
                if problem is not None and error_for_user(problem) is None:
                    # `log` imports this module.
                    if problem is not error and (log := sys.modules.get("autoprof.base.log")) is not None:
                        log.error_once("interrupted work could not be ended", problem)
                    return
                problem = None
                work()
                break
            except BaseException as raised:
                problem = last = raised
        if last is not None and (interrupt := error_for_user(last)) is not None:
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
    while (context := context_of(error)) is not None and context is not outer:
        traceback = traceback_of(context)
        if traceback is None or not _is_handler(traceback.tb_frame):
            set_context(error, outer if outer is not error else None)
            return
        error = context


class guard:
    """Root of autoprof's code: an error of autoprof in the `with` block ends here and is reported.

    Exceptions that must reach the user's code pass (`error_for_user`).

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
        if (user_error := error_for_user(error)) is not None:
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


def attempt(work: Callable[..., _T], *args: Any) -> tuple[_T | None, Exception | None]:
    """Call code that may raise any exception, because it is not autoprof's or depends on a release.

    Returns:
        The result and None, or None and the exception.
    """
    try:
        return work(*args), None
    except Exception as error:
        pass_on(error)
        return None, error


def error_of_handler(error: BaseException | None) -> BaseException | None:
    """Return the exception that a signal handler raised, or None if no handler raised one.

    The exception is `error` itself, or is in its chain of contexts and causes. A context that was raised before
    autoprof's code was called does not count: the frame that caught it is not in the traceback of `error`.
    """
    frames: set[FrameType] = set()
    while error is not None:
        entries = list(_entries(traceback_of(error)))
        # Python replaces the StopIteration of a generator by a RuntimeError without the generator's frame.
        if frames and (not entries or (entries[0] not in frames and not issubclass(type(error), StopIteration))):
            return None
        # The first frame is the frame that caught the exception.
        if any(map(_is_handler, entries[1:])):
            return error
        if frames.issuperset(entries):
            return None
        frames.update(entries)
        cause = cause_of(error)
        error = context_of(error) if cause is None else cause
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


def type_name(error: BaseException) -> str:
    """Return the name of the exception's class."""
    return name_of(type(error))


def attribute(error: BaseException, name: str) -> Any:
    """Return an attribute from the exception's `__dict__`, or None if it is not there. Properties are not called."""
    return _attributes_of(error).get(name)


def group_of(error: BaseException) -> tuple[Any, ...]:
    """Return the exceptions in an exception group, or an empty tuple if `error` is not a group."""
    for kind in mro_of(type(error)):
        if name_of(kind) == GROUP:
            # On Python 3.10 the package `exceptiongroup` defines groups. They keep their exceptions in `_exceptions`.
            member = members_of(kind).get("exceptions")
            group = member.__get__(error) if type(member) is MemberDescriptorType else attribute(error, "_exceptions")
            return group if type(group) is tuple else ()
    return ()


def described(error: BaseException) -> str:
    """Return the exception's type and text, or only the type if there is no text."""
    return ": ".join(filter(None, [type_name(error), text(error)]))


def reason(error: BaseException) -> str:
    """Return the exception's text. If it has no text, such as a `MemoryError`, return its type."""
    return text(error) or type_name(error)


def text(error: BaseException) -> str:
    """Return the exception's text. This function raises only exceptions of signal handlers.

    If the program defines `__str__`, this function does not call it and makes the text from the exception's arguments.
    The reason: `__str__` may print, wait, count its calls or exit, and without autoprof nothing would call it for an
    exception that the program catches.
    """
    try:
        return _text(error, 0)
    except BaseException as problem:
        pass_on(problem)
        if issubclass(type(problem), KeyboardInterrupt):  # Python's own handler of Ctrl-C has no frame
            raise
        return ""


def _text(error: BaseException, depth: int) -> str:
    arguments, method = args_of(error), _method(type(error), "__str__")
    in_python = type(method) is FunctionType
    # A `__str__` written in C shows the arguments, except for groups, which show the number of their exceptions.
    shows_arguments = not in_python and name_of(getattr(method, "__objclass__", object)) != GROUP
    values = (*arguments, *_members(error))
    if _is_library(method) and method is not object.__str__ and not (shows_arguments and not _are_quiet(values, depth)):
        return str(error)
    if len(arguments) == 1:
        return _argument(arguments[0], depth, str)
    return f"({', '.join(_argument(value, depth, repr) for value in arguments)})" if arguments else ""


def _argument(value: Any, depth: int, show: Callable[[Any], str]) -> str:
    """Return an argument as text. If making this text would run the program's code, return only the type."""
    if _is_quiet(value, depth):
        return show(value)
    if issubclass(type(value), BaseException) and depth < _MAX_DEPTH:
        return f"{type_name(value)}({_text(value, depth + 1)})"
    return f"<{name_of(type(value))}>"


def _are_quiet(values: Iterable[Any], depth: int) -> bool:
    return depth < _MAX_DEPTH and all(_is_quiet(value, depth + 1) for value in values)


def _is_quiet(value: Any, depth: int) -> bool:
    """Return True if converting `value` to text runs no code of the program."""
    kind = type(value)
    if kind in _ATOMS:
        return True
    if kind in _CONTAINERS:
        return _are_quiet(value, depth) and (kind is not dict or _are_quiet(value.values(), depth))
    if not (_is_library(_method(kind, "__str__")) and _is_library(_method(kind, "__repr__"))):
        return False
    return not issubclass(kind, BaseException) or _are_quiet((*args_of(value), *_members(value)), depth)


def _members(error: BaseException) -> list[Any]:
    """Return the attributes that a builtin `__str__` shows besides the arguments, such as `OSError.filename`."""
    kinds = [kind for kind in mro_of(type(error)) if kind in _SHOW_MEMBERS]
    members = [member for kind in kinds for member in members_of(kind).values()]
    return [member.__get__(error) for member in members if type(member) is MemberDescriptorType]


def _method(kind: type, name: str) -> Any:
    return next((members_of(base)[name] for base in mro_of(kind) if name in members_of(base)), None)


def _is_library(method: Any) -> bool:
    """Return True if a method is written in C, or belongs to the standard library, autoprof or an installed package."""
    if type(method) is not FunctionType:
        return type(method) in (WrapperDescriptorType, MethodDescriptorType) or (
            name_of(type(method)) == "cython_function_or_method"
        )
    file = method.__code__.co_filename
    return file.startswith((*_LIBRARIES, "<frozen ")) or any(part in file for part in _PACKAGES)


def no_size_signal(call: Callable[..., Any], *args: Any) -> Any:
    """Call `call` without the signal SIGXFSZ. Writes beyond the limit of file sizes fail with EFBIG.

    If a signal handler of the program blocks other signals during the call, these signals stay blocked.

    Returns:
        The result of `call`.
    """
    signals = {_signal.SIGXFSZ}
    blocked = signals <= _signal.pthread_sigmask(_signal.SIG_BLOCK, ())
    restore = _signal.SIG_BLOCK if blocked else _signal.SIG_UNBLOCK
    pending = signals.intersection(_signal.sigpending())
    # The signal mask is restored twice, because a signal handler that raises may interrupt the first call.
    try:
        try:
            _signal.pthread_sigmask(_signal.SIG_BLOCK, signals)
            return call(*args)
        finally:
            if signals.intersection(_signal.sigpending()) - pending:
                _signal.sigtimedwait(signals, 0)
            _signal.pthread_sigmask(restore, signals)
    finally:
        _signal.pthread_sigmask(restore, signals)
