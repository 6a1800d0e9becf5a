"""Hooks for scripts, and modules started with `python -m`, that run as `__main__`: their functions and classes are
wrapped as soon as they are defined.

No import executes such a file, so nothing tells when a name of it is there. Python's tracing does, line by line of the
file's top level and of nothing else. It goes on until the last hook is applied, which for most files is before their
`if __name__ == "__main__"`. Until then each call of a Python function in that thread takes longer, mostly those of the
file's imports.
"""

from __future__ import annotations

import sys
from types import CodeType, FrameType
from typing import Any

from autoprof._boot import command
from autoprof.base import interrupts, process
from autoprof.base.originals import os
from autoprof.hooks import patching, registry
from autoprof.hooks.recipe import BoundHook
from autoprof.run import runtime

_TOP_LEVEL = "<module>"
# After this many calls, and each time so many more, tracing ends if a hook of the file was called: the work has begun.
_OFTEN = 1 << 16
# After these it ends in any case. The imports of verl, vLLM and torch make a tenth of them.
_MOST = 1 << 26


class _State(process.State):
    """The hooks that wait for their names, by their files, and the calls that were traced."""

    def begin(self) -> None:
        self.waiting: dict[str, list[BoundHook]] = {}
        self.files: set[str] = set()
        self.calls = 0
        if sys.gettrace() is _called:
            sys.settrace(None)


def runs(module: str) -> bool:
    """Return whether this process was started with the module (`python -m package.module`)."""
    return command.THIS.kind == "-m" and module.removesuffix(".__main__") == command.THIS.what


def watch(hook: BoundHook) -> None:
    """Apply a hook for a name of a script when that is defined: now, or while the script's top level is executed."""
    # What is said in the end where a debugger or a coverage tool takes the tracing over.
    _say([hook], f"{hook.hook.module} was not seen to define it: is it traced by a debugger or a coverage tool?")
    if sys.gettrace() not in (None, _called):
        return
    _state.waiting.setdefault(hook.hook.module, []).append(hook)
    _state.files.add(hook.hook.module)
    # A script that starts its run by itself has begun.
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if _file_of(frame) is not None:
            frame.f_trace = _executed
            _look(frame)
        frame = frame.f_back
    if _state.waiting:
        sys.settrace(_called)


def _called(frame: FrameType, event: str, arg: Any) -> Any:
    """Trace a frame line by line if it is the top level of a file with hooks."""
    try:
        if frame.f_code.co_name == _TOP_LEVEL and (file := _file_of(frame)) is not None:
            _leave_out_unknown(file, frame.f_code)
            return _executed if file in _state.waiting else None
        _state.calls += 1
        if _state.calls % _OFTEN == 0 and (_state.calls >= _MOST or _begun()):
            for file in list(_state.waiting):
                _give_up(file, "was not defined before its work began")
        if not _state.waiting:
            _end(frame)
    except Exception as error:
        interrupts.pass_on(error)
        _failed(frame, error)
    return None


def _executed(frame: FrameType, event: str, arg: Any) -> Any:
    """Apply the hooks for names that the lines so far have defined."""
    try:
        _look(frame)
        if event == "return" and (file := _file_of(frame)) is not None:
            _give_up(file, "was executed without defining it")
        if not _state.waiting:
            _end(frame)
            return None
    except Exception as error:
        interrupts.pass_on(error)
        _failed(frame, error)
        return None
    return _executed


def _failed(frame: FrameType, error: Exception) -> None:
    """End the tracing after an error of autoprof's: what a trace function raises is raised in the traced function."""
    runtime.report("main", error)
    _state.waiting.clear()
    _end(frame)


def _look(frame: FrameType) -> None:
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
    """Leave out the hooks for names that do not occur in the top level of a file."""
    if ("*",) in code.co_consts:  # `from module import *`
        return
    hooks = _state.waiting.pop(file)
    known = [hook for hook in hooks if hook.hook.attribute.partition(".")[0] in code.co_names]
    _say([hook for hook in hooks if hook not in known], f"{file} has no such name")
    if known:
        _state.waiting[file] = known


def _begun() -> bool:
    """Return whether a hook of one of the files was called."""
    run = runtime.current()
    hooks = [hook.key for hook in registry.known_hooks() if hook.hook.module in _state.files]
    return run is None or any(run.hooks.was_called(key) for key in hooks)


def _give_up(file: str, why: str) -> None:
    _say(_state.waiting.pop(file), f"{file} {why}")


def _say(hooks: list[BoundHook], why: str) -> None:
    if (run := runtime.current()) is not None:
        for hook in hooks:
            if not run.hooks.is_applied(hook.key):  # the module may be imported, too
                run.hooks.skipped(hook, why)


def _end(frame: FrameType) -> None:
    frame.f_trace = None
    if sys.gettrace() is _called:
        sys.settrace(None)


def _file_of(frame: FrameType) -> str | None:
    """Return the file or module with hooks whose top level a frame executes, if it is one."""
    code = frame.f_code
    if code.co_name != _TOP_LEVEL:
        return None
    spec = frame.f_globals.get("__spec__") if frame.f_globals.get("__name__") == "__main__" else None
    path, name = f"{os.sep}{code.co_filename}", getattr(spec, "name", None)
    return next((file for file in _state.waiting if file == name or path.endswith(f"{os.sep}{file}")), None)


_state = _State()
