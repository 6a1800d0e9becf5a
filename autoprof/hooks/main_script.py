"""Hooks for files that run as `__main__`: scripts, and modules that are started with `python -m`.

A function or class is wrapped as soon as the file defines it. No import executes such a file. So autoprof uses
Python's tracing, `sys.settrace`, to see when a name is defined. autoprof traces only the lines of the file's top level.

Tracing ends when the last hook of the file is applied. In most files, this is before the line
`if __name__ == "__main__"`. Until then, each call of a Python function in the main script's thread takes longer. Most
of these calls come from the imports of the file.
"""

from __future__ import annotations

import sys
from types import CodeType, FrameType
from typing import Any

from autoprof import _boot
from autoprof.base import process, seam
from autoprof.base.originals import os
from autoprof.hooks import patching, registry
from autoprof.hooks.recipe import BoundHook
from autoprof.run import runtime

_TOP_LEVEL = "<module>"
# After the trace function has seen this number of calls, check whether a hook of the file was called. If so, the work
# of the file has begun, and tracing ends.
CHECK_AFTER_CALLS = 1 << 16
# Number of calls after which the trace function is removed in any case. The imports of verl, vLLM and torch make a
# tenth of this number.
MAX_CALLS = 1 << 26


class _MainScriptState(process.State):
    """The hooks that wait until a file defines their names, and the number of calls that were traced.

    Attributes:
        waiting: Dict from a file, or a module of `python -m`, to its hooks whose names are not defined yet.
        files: All files that have or had such hooks.
        calls: Number of calls for which Python has called the trace function.
    """

    def reset(self) -> None:
        self.waiting: dict[str, list[BoundHook]] = {}
        self.files: set[str] = set()
        self.calls = 0
        if sys.gettrace() is _trace_lines:
            sys.settrace(None)


def runs(module: str) -> bool:
    """Return True if this process was started with the module (`python -m package.module`)."""
    return _boot.COMMAND.kind == "-m" and module.removesuffix(".__main__") == _boot.COMMAND.what


def watch(hook: BoundHook) -> None:
    """Apply a hook as soon as the script defines the hooked name: now, or while the script's top level is executed."""
    # If a debugger or a coverage tool replaces the trace function, the hook keeps this reason.
    _skip([hook], f"autoprof did not see {hook.hook.module} define it; does a debugger or a coverage tool trace it?")
    if sys.gettrace() not in (None, _trace_lines):
        return
    _state.waiting.setdefault(hook.hook.module, []).append(hook)
    _state.files.add(hook.hook.module)
    # If the script itself has started the run (`autoprof.start`), its top level is already being executed.
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if _file_of(frame) is not None:
            frame.f_trace = _trace_lines
            _apply_defined(frame)
        frame = frame.f_back
    if _state.waiting:
        sys.settrace(_trace_lines)


def _trace_lines(frame: FrameType, event: str, arg: Any) -> Any:
    """Trace the lines of a frame if the frame is the top level of a file with hooks. For `sys.settrace`."""
    try:
        if event != "call":
            return _handle_executed_lines(frame, event)
        if frame.f_code.co_name == _TOP_LEVEL and (file := _file_of(frame)) is not None:
            _leave_out_unknown(file, frame.f_code)
            return _trace_lines if file in _state.waiting else None
        _state.calls += 1
        if _state.calls % CHECK_AFTER_CALLS == 0 and (_state.calls >= MAX_CALLS or _was_called()):
            for file in list(_state.waiting):
                _give_up(file, "had not defined it when its work began")
        if not _state.waiting:
            _end(frame)
    except Exception as error:  # Python would raise it in the traced function
        seam.pass_on(error)
        runtime.report("main", error)
        _state.waiting.clear()
        _end(frame)
    return None


def _handle_executed_lines(frame: FrameType, event: str) -> Any:
    """Apply the hooks for the names that the executed lines have defined.

    Returns:
        The trace function for the next lines. None if no hook waits any more.
    """
    _apply_defined(frame)
    if event == "return" and (file := _file_of(frame)) is not None:
        _give_up(file, "was executed without defining it")
    if _state.waiting:
        return _trace_lines
    _end(frame)
    return None


def _apply_defined(frame: FrameType) -> None:
    """Apply the waiting hooks whose names the top level of the file has defined."""
    file = _file_of(frame)
    if file is None:
        return
    module = sys.modules.get(str(frame.f_globals.get("__name__")))
    if module is None or module.__dict__ is not frame.f_globals:
        return
    hooks = _state.waiting[file]
    for hook in [hook for hook in hooks if hook.hook.attribute.partition(".")[0] in frame.f_globals]:
        hooks.remove(hook)
        patching.apply_to_module(hook, module)
    if not hooks:
        del _state.waiting[file]


def _leave_out_unknown(file: str, code: CodeType) -> None:
    """Skip hooks for names that do not occur in the top level of a file."""
    if ("*",) in code.co_consts:  # `from module import *`
        return
    hooks = _state.waiting.pop(file)
    known_hooks = [hook for hook in hooks if hook.hook.attribute.partition(".")[0] in code.co_names]
    _skip([hook for hook in hooks if hook not in known_hooks], f"{file} has no such name")
    if known_hooks:
        _state.waiting[file] = known_hooks


def _was_called() -> bool:
    """Return True if a hook of one of the files was called."""
    run = runtime.current()
    hooks = [hook.key for hook in list(registry.bound.values()) if hook.hook.module in _state.files]
    return run is None or any(run.hooks.was_called(key) for key in hooks)


def _give_up(file: str, reason: str) -> None:
    _skip(_state.waiting.pop(file), f"{file} {reason}")


def _skip(hooks: list[BoundHook], reason: str) -> None:
    if (run := runtime.current()) is not None:
        for hook in hooks:
            if not run.hooks.is_applied(hook.key):  # the program may also have imported the module, with the hook
                run.hooks.skipped(hook, reason)


def _end(frame: FrameType) -> None:
    frame.f_trace = None
    if sys.gettrace() is _trace_lines:
        sys.settrace(None)


def _file_of(frame: FrameType) -> str | None:
    """If this frame executes the top level of a file or module with waiting hooks, return its key in `waiting`.

    Otherwise return None.
    """
    code = frame.f_code
    if code.co_name != _TOP_LEVEL:
        return None
    spec = frame.f_globals.get("__spec__") if frame.f_globals.get("__name__") == "__main__" else None
    path, name = f"{os.sep}{code.co_filename}", getattr(spec, "name", None)
    return next((file for file in _state.waiting if file == name or path.endswith(f"{os.sep}{file}")), None)


_state = _MainScriptState()
