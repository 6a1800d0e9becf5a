"""Texts of the program's exceptions, made without running the program's code. Standard library only."""

from __future__ import annotations

from types import FunctionType, MemberDescriptorType, MethodDescriptorType, WrapperDescriptorType

from autoprof.base import seam
from autoprof.base.exceptions import GROUP, args_of, members_of, mro_of, name_of, type_name
from autoprof.base.originals import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

# Code in these folders does not belong to the program: the standard library, autoprof, installed packages.
_LIBRARIES = tuple(os.path.dirname(path) + os.sep for path in (os.__file__, os.path.dirname(os.path.abspath(__file__))))
_PACKAGES = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
_ATOMS = frozenset((str, bytes, int, float, complex, bool, type(None)))
_CONTAINERS = frozenset((tuple, list, set, frozenset, dict))
# Classes whose `__str__` shows attributes, which may be objects of the program (Objects/exceptions.c).
_SHOW_MEMBERS = (OSError, SyntaxError, ImportError, UnicodeEncodeError, UnicodeDecodeError, UnicodeTranslateError)
# Containers at a greater depth are not shown, because a container may contain itself.
_MAX_DEPTH = 5


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
        seam.pass_on(problem)
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
