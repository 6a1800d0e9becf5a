"""Functions that read and change the program's exceptions without running the program's code.

A class of exceptions may define properties, slots, `__setattr__`, `__getattribute__`, `__bool__` or a metaclass. So
these functions use the descriptors of `BaseException` and `type`, as the interpreter does. Standard library only.
"""

from __future__ import annotations

from types import MemberDescriptorType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Any

    Link = Callable[[BaseException], "BaseException | None"]

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
