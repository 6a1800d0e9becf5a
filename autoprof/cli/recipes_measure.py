"""Measurement of a program's own functions, for `autoprof recipes --new`.

This module imports only the standard library, because any Python must be able to load it. Each process of the command
counts the calls and the seconds of its functions with `sys.setprofile`. The process writes the counts to a file every
second, because it may be killed.
"""

from __future__ import annotations

import atexit
import contextvars
import functools
import json
import opcode
import os
import sys
import sysconfig
import threading
import time
from types import CodeType, FrameType, FunctionType, GetSetDescriptorType
from typing import Any

# Number of a function's first calls whose integers are recorded. They show which integer counts the steps.
_MAX_SAMPLES = 8
# A function is no longer measured if this number of calls took less than this number of seconds altogether. Such a
# function is too short for a stage.
_MAX_SHORT_CALLS, _SHORT_SECONDS = 10_000, 0.1
# Maximum number of integers that are recorded per call.
_MAX_INTEGERS = 50
_GENERATORS, _COROUTINE = 0x20 | 0x200, 0x80
# Instructions at which a coroutine is suspended, in Python 3.10 to 3.14. A return at another instruction ends the
# coroutine's call.
_SUSPENDING = {opcode.opmap[name] for name in ("YIELD_FROM", "YIELD_VALUE", "RESUME") if name in opcode.opmap}
_PATHS = sysconfig.get_paths()
_LIBRARIES = tuple(os.path.join(_PATHS[name], "") for name in ("stdlib", "platstdlib"))
_INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))


class _Function:
    """Number of calls and seconds of one function.

    `first` is the time when the first call began, and `last` the time when the last call ended, both in seconds since
    the measurement began.
    """

    def __init__(self, frame: FrameType) -> None:
        self.code = frame.f_code
        self.module = str(frame.f_globals.get("__name__"))
        self.is_coroutine = bool(self.code.co_flags & _COROUTINE)
        self.started = self.calls = self.open = self.overlaps = 0
        self.seconds = self.first = self.last = 0.0
        self.samples: list[dict[str, int]] = []
        self.has_rank = False
        # Number of calls, seconds, and number of runs of calls without a call of another function in between, by the
        # `id` of the calling function's code.
        self.callers: dict[int, list[float]] = {}
        # The function that this function has called last.
        self.last_called: _Function | None = None


class _Call:
    """A call that has not ended. `outermost` is False for a recursive call. Recursive calls are not counted."""

    __slots__ = ("begin", "caller", "frame", "function", "outermost")

    def __init__(self, function: _Function, frame: FrameType, outermost: bool) -> None:
        self.function, self.frame, self.outermost = function, frame, outermost
        self.caller = _innermost.get()
        self.begin = time.perf_counter()


# The innermost open call. An asyncio task copies the context of the call that creates the task. Therefore the caller of
# its coroutine is known.
_innermost: contextvars.ContextVar[_Call | None] = contextvars.ContextVar("autoprof_innermost", default=None)


class Measurement:
    """The measurement of the functions of this process, and the file to which it is written.

    Args:
        folder: Folder for the files of all processes.
        packages: Installed packages to measure, as if they were the user's own.
    """

    def __init__(self, folder: str, packages: list[str]) -> None:
        self._folder, self._packages = folder, packages
        self._suspended: dict[FrameType, _Call] = {}
        self._begin()
        atexit.register(self._write)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        """Begin the measurement of this process. A forked child process calls this method, too."""
        # Functions by the `id` of their code; None for a function that is not measured. `_codes` keeps the codes alive,
        # so that their ids stay unique.
        self._functions: dict[int, _Function | None] = {}
        self._codes: list[CodeType] = []
        self._suspended.clear()
        # Two threads write the file: the thread that is started here, and at exit the main thread.
        self._lock = threading.Lock()
        self._began = time.perf_counter()
        self._path = os.path.join(self._folder, f"{os.getpid()}-{time.time_ns()}.json")
        threading.Thread(target=self._write_each_second, name="autoprof-measure", daemon=True).start()
        threading.setprofile(self._begin_thread)
        self._begin_thread()

    def _begin_thread(self, *event: Any) -> None:
        """Measure the calls in the current thread."""
        # The open calls of measured functions in this thread.
        stack: list[_Call] = []

        def count(frame: FrameType, event: str, arg: Any) -> None:
            """Count a call or a return, as `sys.setprofile` reports it."""
            if event == "call":
                function = self._function_of(frame)
                if function is not None:
                    self._begin_call(function, frame, stack)
            elif event == "return" and stack and stack[-1].frame is frame:
                self._end_call(stack.pop())

        sys.setprofile(count)

    def _function_of(self, frame: FrameType) -> _Function | None:
        """Return the function of a frame. Return None for functions that are not measured.

        These are functions of libraries, functions without a name, and generators.
        """
        code = frame.f_code
        try:
            return self._functions[id(code)]
        except KeyError:
            self._codes.append(code)
            function = _Function(frame) if self._is_measured(frame) else None
            self._functions[id(code)] = function
            return function

    def _is_measured(self, frame: FrameType) -> bool:
        code, path = frame.f_code, frame.f_code.co_filename
        if code.co_flags & _GENERATORS or (code.co_name.startswith("<") and code.co_name != "<module>"):
            return False
        if str(frame.f_globals.get("__name__")).partition(".")[0] in self._packages:
            return True
        if path.startswith(("<", *_LIBRARIES)) or any(part in path for part in _INSTALLED) or _is_in_target(path):
            return False
        return path != __file__

    def _begin_call(self, function: _Function, frame: FrameType, stack: list[_Call]) -> None:
        """Begin a call of a function. If a coroutine was suspended in this frame, continue its call."""
        if function.is_coroutine and (call := self._suspended.pop(frame, None)) is not None:
            stack.append(call)
            return
        recursive = function.open > 0 and any(call.function is function for call in stack)
        call = _Call(function, frame, not recursive)
        stack.append(call)
        _innermost.set(call)
        if recursive:
            return
        function.overlaps += function.open > 0
        function.open += 1
        function.started += 1
        if function.started == 1:
            function.first = call.begin - self._began
        if function.started <= _MAX_SAMPLES and function.code.co_name != "<module>":
            function.samples.append(_integers(frame))
            function.has_rank |= "self.rank" in function.samples[-1]

    def _end_call(self, call: _Call) -> None:
        """End a call. If the coroutine was only suspended, keep its call for `_begin_call`."""
        function = call.function
        if function.is_coroutine and function.code.co_code[call.frame.f_lasti] in _SUSPENDING:
            self._suspended[call.frame] = call
            return
        _innermost.set(call.caller)
        if not call.outermost:
            return
        now = time.perf_counter()
        function.open -= 1
        function.calls += 1
        function.seconds += now - call.begin
        function.last = now - self._began
        if function.calls == _MAX_SHORT_CALLS and function.seconds < _SHORT_SECONDS:
            self._functions[id(function.code)] = None
        sums = function.callers.setdefault(id(call.caller and call.caller.function.code), [0, 0.0, 0])
        sums[0] += 1
        sums[1] += now - call.begin
        if call.caller is not None and call.caller.function.last_called is not function:
            call.caller.function.last_called = function
            sums[2] += 1

    def _write_each_second(self) -> None:
        sys.setprofile(None)
        path = self._path
        while path == self._path:
            time.sleep(1)
            self._write()

    def _write(self) -> None:
        """Write the functions to the file of this process. The file is replaced, so that it is complete at any time."""
        functions = [function for function in list(self._functions.values()) if function and function.started]
        attributes = _attributes({function.module for function in functions})
        numbers = {id(function.code): number for number, function in enumerate(functions)}
        rows = [
            {
                "module": _module_name(function),
                "attribute": attributes.get(id(function.code), ""),
                "name": function.code.co_name,
                "calls": function.calls,
                "seconds": function.seconds,
                "first": function.first,
                "last": function.last,
                "overlaps": function.overlaps,
                "samples": function.samples,
                "has_rank": function.has_rank,
                "callers": [
                    [numbers[caller], *sums] for caller, sums in list(function.callers.items()) if caller in numbers
                ],
            }
            for function in functions
        ]
        partial = f"{self._path}.partial"
        try:
            with self._lock, open(partial, "w", encoding="utf-8") as file:
                json.dump({"seconds": time.perf_counter() - self._began, "functions": rows}, file)
                file.close()
                os.replace(partial, self._path)
        except OSError:  # the command that measures has ended and removed the folder
            pass


def _is_in_target(path: str) -> bool:
    """Return True if a file is in a folder on `sys.path` with installed packages, as of `pip install --target`."""
    return any(
        isinstance(entry, str) and path.startswith(os.path.join(entry, "")) and _has_packages(entry)
        for entry in list(sys.path)
        if entry
    )


@functools.cache
def _has_packages(folder: str) -> bool:
    try:
        return any(name.endswith(".dist-info") for name in os.listdir(folder))
    except OSError:
        return False


def _integers(frame: FrameType) -> dict[str, int]:
    """Return the integers among the arguments of a call: dict from the path in a recipe to the integer.

    For a method, also return the integers among the attributes of the arguments, and of the attributes of `self`.
    """
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    values = {name: frame.f_locals[name] for name in names if name in frame.f_locals}
    for path, holder in [*values.items()] if names[:1] == ("self",) else []:
        attributes = _variables(holder)
        values.update({f"{path}.{name}": value for name, value in attributes.items()})
        if path == "self":
            for name, value in attributes.items():
                values.update({f"self.{name}.{inner}": number for inner, number in _variables(value).items()})
    integers = {path: value for path, value in values.items() if type(value) is int}
    return dict([*integers.items()][:_MAX_INTEGERS])


def _variables(value: Any) -> dict[str, Any]:
    """Return the attributes of an object by name. Neither a property nor `__getattr__` is called."""
    attributes = next((vars(kind)["__dict__"] for kind in type(value).__mro__ if "__dict__" in vars(kind)), None)
    variables = attributes.__get__(value) if type(attributes) is GetSetDescriptorType else None
    if type(variables) is not dict:  # a module, a class, or an object with slots
        return {}
    return {name: item for name, item in list(variables.items())[:_MAX_INTEGERS] if isinstance(name, str)}


def _attributes(modules: set[str]) -> dict[int, str]:
    """Return the attribute by which a recipe names each function of the modules, by the `id` of the function's code."""
    attributes: dict[int, str] = {}
    for module in modules:
        holders = [("", vars(sys.modules[module]))] if module in sys.modules else []
        for prefix, holder in holders:
            for name, value in list(holder.items()):
                if isinstance(value, type) and value.__module__ == module and prefix.count(".") < 3:
                    holders.append((f"{prefix}{name}.", dict(vars(value))))
                function = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
                while isinstance(function, FunctionType) and hasattr(function, "__wrapped__"):
                    function = function.__wrapped__
                if not isinstance(function, FunctionType) or function.__module__ != module:
                    continue
                if function.__code__.co_name == name:
                    attributes.setdefault(id(function.__code__), f"{prefix}{name}")
    return attributes


def _module_name(function: _Function) -> str:
    """Return the name of a function's module in a recipe.

    For `__main__`, this is the name of the script's file, or `package.module` after `python -m`.
    """
    if function.module != "__main__":
        return function.module
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name if spec is not None else os.path.basename(function.code.co_filename)
