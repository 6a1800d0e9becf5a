"""Copies of modules of the standard library, which a program's patches do not reach.

A test may replace `os.replace`, `open` or `time.sleep` in a process with hooks (`unittest.mock`, freezegun, pyfakefs).
The replacement must not receive autoprof's calls, and autoprof must not read a frozen clock. So the code that runs in a
program imports these modules from here: `from autoprof.base.originals import os, time`.

freezegun and pyfakefs look for modules by name in `sys.modules`, and for functions in each module there. So the copies
have other names and are no entries of `sys.modules`. Standard library only.
"""

from __future__ import annotations

import builtins
from types import FunctionType, ModuleType

TYPE_CHECKING = False
if TYPE_CHECKING:
    import atexit as atexit
    import fcntl as fcntl
    import io as io
    import json as json
    import os as os
    import shutil as shutil
    import subprocess as subprocess
    import tempfile as tempfile
    import threading as threading
    import time as time
    from typing import Any

# Attributes of a class that are not copied, because Python makes them for each new class.
_OF_CLASS = ("__dict__", "__weakref__")
# Attributes of `os.environ`, in the order in which its class takes them as arguments.
_OF_ENVIRON = ("_data", "encodekey", "decodekey", "encodevalue", "decodevalue")
# Dict from module name to copy. If the code of one copy imports a module in this dict, it gets the copy.
_copies: dict[str, Any] = {}


def _copy_module(name: str) -> Any:
    """Return a copy of a module: another namespace with the same contents."""
    copy: Any = ModuleType(f"{__name__}.{name}")
    contents = vars(__import__(name))
    vars(copy).update({key: value for key, value in contents.items() if key not in vars(copy)})
    _copies[name] = copy
    return copy


def _bind(value: Any, module: Any, space: dict[str, Any]) -> Any:
    """If `value` is a function of `module`, return it with the globals `space`. Return any other value unchanged."""
    if isinstance(value, FunctionType) and value.__globals__ is vars(module):
        bound = FunctionType(value.__code__, space, value.__name__, value.__defaults__, value.__closure__)
        bound.__kwdefaults__ = value.__kwdefaults__
        return bound
    return value


def _run_module_again(name: str) -> Any:
    """Run the code of a module again, and return the new module. If the code imports modules, it gets the copies."""
    module: Any = __import__(name)
    copy: Any = ModuleType(f"{__name__}.{name}")
    vars(copy)["__builtins__"] = vars(builtins) | {"__import__": _import, "open": io.open}
    exec(module.__spec__.loader.get_code(name), vars(copy))
    _copies[name] = copy
    return copy


def _import(name: str, *arguments: Any) -> Any:
    return _copies[name] if name in _copies else __import__(name, *arguments)


def _make_os_copy() -> Any:
    """Return a copy of `os` and `os.path`, whose functions call functions of the copy.

    Raises:
        ImportError: A tool such as pyfakefs has replaced the module `os` by another object.
    """
    import os
    import posix

    if not isinstance(os, ModuleType):
        raise ImportError(f"os is a {type(os).__name__} now, not Python's module; import the trainer before that")
    own = _copy_module("os")
    space = vars(own)
    # If a program has patched `os` by now, `posix` still has the functions.
    space.update({name: value for name, value in vars(posix).items() if name in os.__all__ and name != "environ"})
    space.update({name: _bind(value, os, space) for name, value in space.items()})
    space["fdopen"] = io.open  # the function imports `io` when it is called
    _run_module_again("genericpath")
    space["path"] = _run_module_again("posixpath")
    space["environ"] = _make_environ_copy(os.environ)
    return own


def _make_environ_copy(environ: Any) -> Any:
    """Return a second object for the process's environment, so that mocks of `os.environ.get` don't get its calls."""
    if type(environ).__name__ != "_Environ":  # a program has replaced `os.environ` by another mapping
        return environ
    return type(environ)(*(vars(environ)[name] for name in _OF_ENVIRON))


def _make_threading_copy() -> Any:
    """Return a copy of `threading` whose `Event` uses classes of the copy."""
    import threading

    own = _copy_module("threading")
    for name in ("Condition", "Event"):
        members = {key: value for key, value in vars(getattr(threading, name)).items() if key not in _OF_CLASS}
        members = {key: _bind(value, threading, vars(own)) for key, value in members.items()}
        setattr(own, name, type(name, (), members))
    return own


def __getattr__(name: str) -> Any:
    """Make the copy of a module at its first use: it takes 0.3 ms, and few processes need the module."""
    if name not in ("shutil", "subprocess", "tempfile"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    copy = _run_module_again(name)
    if name == "tempfile":
        copy.tempdir = __import__(name).tempdir  # the program may have set it
    return globals().setdefault(name, copy)


if not TYPE_CHECKING:
    # Not `open` itself: pyfakefs replaces functions in each module that has one.
    io = _copy_module("io")
    io.open = __import__("_io").open
    os, threading = _make_os_copy(), _make_threading_copy()
    time, json, atexit, fcntl = map(_copy_module, ("time", "json", "atexit", "fcntl"))
