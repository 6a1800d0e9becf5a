"""torch.profiler as a tool, and its other users in this process.

torch has one profiler a process: a second one starts without an error and empties the first. So `start` and `stop` of
`torch.profiler.profile` are watched, and of torch_npu's, and autoprof yields to whoever else starts one.
"""

from __future__ import annotations

import json
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import wrapt

from autoprof import _boot
from autoprof.base import files, interrupts, log, process
from autoprof.capture.profilers import module_moves
from autoprof.config.settings import Settings
from autoprof.rundir import file_names

# Words of AUTOPROF_CONTENTS, and what torch calls them.
DEVICES = {"cpu": "cpu", "cuda": "cuda", "npu": "privateuse1"}
FLAGS = {
    "shapes": "record_shapes",
    "memory": "profile_memory",
    "stack": "with_stack",
    "flops": "with_flops",
    "module": "with_modules",
}
# Reason in a meta file where a module moved while shapes were recorded (module_moves.py).
MOVES = "torch.module-moves"
# What follows the events of a trace, which is what Kineto was told of the run, is shorter than this, in bytes.
TAIL = 65536
_OWN = "_autoprof_own"
# A profile is in a reference cycle. Freed by a garbage collection during a later recording, its result crashes the
# process (torch 2.13, libkineto's MemoryTraceLogger); so does one that is freed after a recording that came meanwhile.
# So it is freed when it is written, before anything else records, and kept where it never is.
_unwritten: list[Any] = []
_foreign: weakref.WeakSet[Any] = weakref.WeakSet()


class _State(process.State):
    """Traces of torch in this process that nothing undoes: a recording, and the patches that call `interrupt`."""

    interrupt: Callable[[str], None] | None = None
    recorded = False

    def in_child(self) -> None:
        """Have a forked child of a process that recorded end without Kineto's destructors.

        They wait for threads that a child does not have, and hang or abort (torch 2.13). glibc calls what is registered
        last first, and tells it the exit status: files are flushed, and the process is left, as children of
        multiprocessing leave by `os._exit`.
        """
        if self.recorded:
            with interrupts.suppress(Exception):
                import ctypes

                libc = ctypes.CDLL(None)
                libc.on_exit(libc._exit, None)
                libc.on_exit(libc.fcloseall, None)


_state = _State()


class TorchTool:
    """Records with `torch.profiler.profile` and writes a Chrome trace."""

    name = "torch"
    ending = file_names.TRACE.removesuffix(".gz")

    def __init__(self) -> None:
        self._profile: Any = None
        self.lost: Sequence[str] = ()

    @staticmethod
    def unavailable() -> str:
        """Return an empty text: torch records wherever there is something to record."""
        return ""

    def start(self, settings: Settings, raw: Path) -> list[str]:
        _state.recorded = True
        arguments, used = profile_arguments(settings.contents)
        # SGLang puts torch_npu's in the place of torch.profiler.profile (0.5.8, scheduler_profiler_mixin.py).
        from torch.profiler.profiler import profile

        self._profile = profile(**arguments)
        mark_own(self._profile)
        if module_moves.REFERRED.intersection(used):
            module_moves.allow(_end_and_free)
        try:
            self._profile.start()
        except BaseException:  # as in `stop`
            _disable()
            raise
        if module_moves.HELD.intersection(used):
            module_moves.begin(self._moved)
        return used

    def _moved(self) -> None:
        self.lost = [MOVES]

    def stamp(self, subject: dict[str, Any]) -> None:
        stamp(self._profile, subject)

    def mark(self, name: str) -> Callable[[], None]:
        return mark(name)

    def stop(self) -> None:
        _unwritten.append(self._profile)
        try:
            self._profile.stop()
        except BaseException:
            # A signal, or its handler, came in between: nothing else would end the recording.
            _disable()
            raise
        finally:
            module_moves.end()

    def abort(self) -> None:
        if self._profile is None:
            return
        _disable()
        module_moves.end()
        # Who is interrupted may keep the traceback, and with it torch's objects.
        if getattr(self._profile, "profiler", None) is not None:
            self._profile.profiler.kineto_results = None
        _forget(self._profile)
        self._profile = None

    def export(self, path: str) -> None:
        """Write the trace, in any thread.

        Raises:
            OSError: What is there is not whole. Kineto says nothing of that: it writes to `.tmp` and renames it, even
                where what was left in its buffer at the end could not be written (torch 2.13).
        """
        try:
            self._profile.export_chrome_trace(path)
        finally:
            _forget(self._profile)
            self._profile = None
        if not _whole(path):
            limit = files.size_limit()
            more = "" if limit is None else f", or the trace over the limit of file sizes, {limit} bytes (ulimit -f)"
            raise OSError(f"torch could not write all of it; is the disk full{more}?")

    def busy(self) -> str:
        return foreign()


def _forget(profile: Any) -> None:
    """Free the recording of a profile."""
    with interrupts.suppress(ValueError):  # it was freed before it was written
        _unwritten.remove(profile)
    profile.profiler = None


def _enabled() -> bool:
    """Return whether somebody records in this process."""
    from torch.autograd import _profiler_enabled

    return bool(_profiler_enabled())


def _disable() -> None:
    """Have torch end what it records, whatever becomes of it."""
    if _enabled():
        from torch.autograd import _disable_profiler

        _disable_profiler()


def _end_and_free(reason: str) -> bool:
    """End and free what autoprof records, or is writing, in this process; returns whether there was something."""
    if _state.interrupt is None or _foreign or not (_unwritten or _enabled()):
        return False
    _state.interrupt(reason)
    for profile in list(_unwritten):
        _forget(profile)
    return True


def _whole(path: str) -> bool:
    """Return whether a Chrome trace of Kineto's ends as one: after the list of events."""
    if not os.path.exists(path):
        return False
    with open(path, "rb", opener=files.descriptor) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
        tail = file.read(TAIL)
    return b"\n  ]" in tail and tail.rstrip().endswith(b"}")


def profile_arguments(contents: tuple[str, ...]) -> tuple[dict[str, Any], list[str]]:
    """Return the arguments of `torch.profiler.profile` for `contents`, and the contents that this build of torch takes.

    Without a device in `contents` the host and every device that torch was built for are recorded.
    """
    import torch.profiler

    activities = {activity.name.lower(): activity for activity in torch.profiler.supported_activities()}
    if "torch_npu" in sys.modules:
        # It has a profiler of its own; this one is for processes that use no NPU, and must not make them take one.
        activities.pop(DEVICES["npu"], None)
    devices = [name for name in DEVICES if DEVICES[name] in activities]
    if any(word in DEVICES for word in contents):
        devices = [name for name in devices if name in contents] or ["cpu"]
    flags = [word for word in contents if word in FLAGS]
    chosen = [activities[DEVICES[name]] for name in devices]
    arguments = {"activities": chosen} | {FLAGS[word]: True for word in flags}
    if "stack" not in flags:  # with stacks torch refuses it
        arguments["experimental_config"] = _trace_only()
    return arguments, devices + flags


def _trace_only() -> Any:
    """Have the stop make no Python objects of the events, which takes a third of its time (torch 2.13); None where
    this torch has no such choice."""
    try:
        from torch._C._profiler import _ExperimentalConfig

        return _ExperimentalConfig(trace_only=True)
    except (ImportError, TypeError) as error:
        interrupts.pass_on(error)
        return None


def stamp(profile: Any, subject: dict[str, Any]) -> None:
    """Make `subject` the key `autoprof` of a trace that is being recorded. After the stop it would be dropped."""
    try:
        profile.add_metadata_json("autoprof", json.dumps(subject))
    except Exception as error:
        interrupts.pass_on(error)
        log.warning_once(f"the trace can't be labelled with its step and rank: {type(error).__name__}: {error}")


def mark(name: str) -> Callable[[], None]:
    """Begin a range in the trace. Return the function that ends it.

    `record_function` would call two operators, which dispatch modes, `make_fx` and `torch.jit.trace` of the program
    see. These functions record the same range without the dispatcher (torch 1.8 and later).
    """
    from torch.autograd import _record_function_with_args_enter, _record_function_with_args_exit

    return partial(_record_function_with_args_exit, _record_function_with_args_enter(name))


def mark_own(profile: Any, own: bool = True) -> None:
    """Tell the watch that a `torch.profiler.profile` is autoprof's, or no longer."""
    setattr(profile, _OWN, own)


def foreign() -> str:
    """Return somebody else's profiler that is recording in this process, or an empty text."""
    return next((f"{_called(profile)} is recording in this process" for profile in _foreign), "")


def watch(interrupt: Callable[[str], None]) -> None:
    """Call `interrupt` with a reason before anyone else's profiler starts. Takes effect when torch is imported."""
    if _state.interrupt is None:
        _state.interrupt = interrupt
        for name in ("torch.profiler.profiler", "torch_npu.profiler.profiler"):
            _boot.when_imported(name, _watch_module)


def _watch_module(module: Any) -> None:
    try:
        wrapt.wrap_function_wrapper(module, "profile.start", _start)
        wrapt.wrap_function_wrapper(module, "profile.stop", _stop)
    except Exception as error:
        interrupts.pass_on(error)
        log.warning_once(f"other users of {module.__name__} can't be noticed: {type(error).__name__}: {error}")


def _start(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    if not getattr(instance, _OWN, False):
        try:
            if _state.interrupt is not None:
                _state.interrupt(f"{_called(instance)} was started in this process")
            _foreign.add(instance)
        except Exception as error:
            interrupts.pass_on(error)
            log.warning_once(f"a capture could not make way for another profiler: {type(error).__name__}: {error}")
    return wrapped(*args, **kwargs)


def _called(profile: Any) -> str:
    return f"another {type(profile).__module__.partition('.')[0]}.profiler"


def _stop(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    _foreign.discard(instance)
    return wrapped(*args, **kwargs)
