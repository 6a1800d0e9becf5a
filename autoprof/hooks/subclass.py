"""Objects with other special methods: each gets a subclass of its class that has them.

Python calls methods such as `__enter__` by an object's class. All but its `type` stays as it was: its identity, its
attributes, `isinstance`, `__class__`, what pickle and copy make of it.
"""

from __future__ import annotations

import abc
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

# Makes a method of a subclass, from the class.
Maker: TypeAlias = Callable[[type], Callable[..., Any]]

# To set an object's class, whatever its class makes of attributes.
_CLASS: Any = object.__dict__["__class__"]
# Their `__init_subclass__` does nothing that others could see.
_HARMLESS = ("builtins", "typing", "typing_extensions")

_made: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()
# Those made last are kept for the next object of the same class, but not all: a program may make classes without end.
_latest: deque[type] = deque(maxlen=64)


def give(target: Any, what: str, makers: Mapping[str, Maker]) -> None:
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
