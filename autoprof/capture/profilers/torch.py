"""torch.profiler as a tool.

The end of a range (`record_function`) writes into the recording in which the range began. If that recording has ended
and another one is on, the write goes to freed memory, and the process crashes or hangs (torch 2.13, `onFunctionExit` in
torch/csrc/autograd/profiler_kineto.cpp). If a range ends twice, its second end does nothing. So autoprof ends all open
ranges before its own recording ends. It also does so before it records after a profiler of the program.
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

from autoprof.base import files, log, process, seam, threads
from autoprof.base.originals import io, json, os
from autoprof.capture.profilers import accepted, foreign, module_moves
from autoprof.config.settings import Settings
from autoprof.rundir import file_names

# torch's names for the words of AUTOPROF_CONTENTS.
DEVICES = {"cpu": "cpu", "cuda": "cuda", "npu": "privateuse1"}
FLAGS = {
    "shapes": "record_shapes",
    "memory": "profile_memory",
    "stack": "with_stack",
    "flops": "with_flops",
    "module": "with_modules",
}
# Word in `left_out` of a meta file if a module moved while shapes were recorded (module_moves.py).
MOVES = "torch.module-moves"
# Maximum bytes after the events of a trace. They hold the metadata that Kineto got.
MAX_TAIL_BYTES = 65536
# Profiles whose results are not written. A profile is in a reference cycle. If its result is freed during or after a
# later recording, for example by the garbage collector, the process crashes (torch 2.13, libkineto's
# MemoryTraceLogger). So a result is freed when it is written, before the next recording. An unwritten one is kept.
_unwritten: list[Any] = []


class _TorchState(process.State):
    """Recordings of torch in this process.

    Attributes:
        recorded: True once torch has recorded.
        entered: Handles of the ranges that began in autoprof's recording, in their order. torch ends the range of a
            handle that is freed.
        enter: The wrapper of `record_function.__enter__`, and the method that it wraps.
    """

    recorded = False

    def begin(self) -> None:
        self.entered: OrderedDict[int, weakref.ref[Any]] = OrderedDict()
        self.enter: tuple[Callable[[Any], Any], Callable[[Any], Any]] | None = None

    def in_child(self) -> None:
        """Make a forked child of a process that has recorded end without Kineto's destructors.

        They wait for threads that do not exist in a child, and hang or abort (torch 2.13). glibc calls the function
        registered last first, and passes it the exit status. So files are flushed, then `_exit` ends the process, as
        `os._exit` ends children of multiprocessing.
        """
        if self.recorded:
            with seam.suppress(ImportError, OSError, AttributeError):  # another libc
                import ctypes

                libc = ctypes.CDLL(None)
                libc.on_exit(libc._exit, None)
                libc.on_exit(libc.fcloseall, None)


_state = _TorchState()


class TorchTool:
    """Tool that records with `torch.profiler.profile` and writes a Chrome trace."""

    name = "torch"
    ending = file_names.TRACE.removesuffix(".gz")

    def __init__(self) -> None:
        self._profile: Any = None
        self._stacks = False
        self.lost: Sequence[str] = ()
        self.remark = ""

    @staticmethod
    def unavailable() -> str:
        """Return an empty text: torch can record in every process that has imported it."""
        return ""

    def start(self, settings: Settings, raw: Path) -> list[str]:
        _state.recorded = True
        contents, self.remark = foreign.without_stacks(settings.contents)
        arguments, used = profile_arguments(contents)
        # Not `torch.profiler.profile`: SGLang replaces that by torch_npu's (0.5.8, scheduler_profiler_mixin.py).
        from torch.profiler.profiler import profile

        self._profile = profile(**arguments, **accepted(profile, {"custom_trace_id_callback": _trace_id}))
        if module_moves.REFERRED.intersection(used):
            module_moves.allow(_end_and_free)
        if foreign.has_ended():
            _end_all_ranges()
        try:
            _watch_ranges()
            foreign.own(True)
            threads.blocking(self._profile.start)  # at the first start, Kineto starts a thread
        finally:
            foreign.own(False)
        # True only if torch has set its profile function in this thread, so that `stop` can see if it was removed.
        self._stacks = "stack" in used and sys.getprofile() is not None
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
            foreign.own(True)
            _end_ranges()
            self._end()
        finally:
            foreign.own(False)
            module_moves.end()

    def _end(self) -> None:
        if not self._stacks:
            self._profile.stop()
            return
        if sys.getprofile() is None or foreign.own_function() is not None:
            self.remark = foreign.ENDED_EARLY
            log.warning_once(self.remark)
        with foreign.kept_function():
            self._profile.stop()

    def abort(self) -> None:
        if self._profile is not None:
            _disable()
            module_moves.end()
            # The program may keep the traceback of the interrupt, and with it torch's objects.
            if getattr(self._profile, "profiler", None) is not None:
                self._profile.profiler.kineto_results = None
            _forget(self._profile)
            self._profile = None
        foreign.own(False)

    def export(self, path: str) -> None:
        """Write the trace, in any thread.

        Raises:
            OSError: The trace is incomplete. Kineto does not report that. It writes to `.tmp` and renames it, even if
                the last part of its buffer could not be written (torch 2.13).
        """
        try:
            self._profile.export_chrome_trace(path)
        finally:
            _forget(self._profile)
            self._profile = None
        if not _complete(path):
            limit = files.size_limit()
            more = "" if limit is None else f", or the trace over the limit of file sizes, {limit} bytes (ulimit -f)"
            raise OSError(f"torch could not write the whole trace; is the disk full{more}?")

    def busy(self) -> str:
        return foreign.busy()


def _trace_id() -> str:
    """Return an id for a trace. torch would use `uuid.uuid4`, which the program may have mocked."""
    return os.urandom(16).hex().upper()


def _forget(profile: Any) -> None:
    """Free the recording of a profile."""
    with seam.suppress(ValueError):  # it was freed before it was written
        _unwritten.remove(profile)
    profile.profiler = None


def _enabled() -> bool:
    """Return True if torch records this thread, for autoprof or for the program."""
    from torch.autograd import _profiler_enabled

    return bool(_profiler_enabled())


def _disable() -> None:
    """End torch's recording of this thread and lose it."""
    _end_ranges()
    if _enabled():
        from torch.autograd import _disable_profiler, profiler

        _disable_profiler()
        if hasattr(profiler, "_is_profiler_enabled"):  # otherwise `profile.stop` resets it
            profiler._is_profiler_enabled = False


def _end_and_free(reason: str) -> bool:
    """End and free autoprof's recordings in this process, also unwritten ones. Return False if there were none."""
    if foreign.known() or not (_unwritten or _enabled()) or not foreign.end_own(reason):
        return False
    for profile in list(_unwritten):
        _forget(profile)
    return True


def _complete(path: str) -> bool:
    """Return True if a Chrome trace of Kineto is complete: the list of events and the object are closed."""
    if not files.exists(path):
        return False
    with io.open(path, "rb", opener=files.descriptor) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - MAX_TAIL_BYTES))
        tail = file.read(MAX_TAIL_BYTES)
    return b"\n  ]" in tail and tail.rstrip().endswith(b"}")


def profile_arguments(contents: tuple[str, ...]) -> tuple[dict[str, Any], list[str]]:
    """Return the arguments of `torch.profiler.profile` for `contents`.

    Without a device in `contents`, the host and every device that torch was built for are recorded.

    Returns:
        The arguments, and the contents that this build of torch supports.
    """
    import torch.profiler

    activities = {activity.name.lower(): activity for activity in torch.profiler.supported_activities()}
    if "torch_npu" in sys.modules:
        # torch_npu has its own profiler. This one runs in processes that use no NPU, and must not make them take one.
        activities.pop(DEVICES["npu"], None)
    devices = [name for name in DEVICES if DEVICES[name] in activities]
    if any(word in DEVICES for word in contents):
        devices = [name for name in devices if name in contents] or ["cpu"]
    flags = [word for word in contents if word in FLAGS]
    chosen = [activities[DEVICES[name]] for name in devices]
    arguments = {"activities": chosen} | {FLAGS[word]: True for word in flags}
    if "stack" not in flags:  # torch refuses it with stacks
        arguments["experimental_config"] = _trace_only()
    return arguments, devices + flags


def _trace_only() -> Any:
    """Return a config with which the stop makes no Python objects of the events, or None if this torch lacks it.

    The objects take a third of the stop's time (torch 2.13).
    """
    try:
        from torch._C._profiler import _ExperimentalConfig

        return _ExperimentalConfig(trace_only=True)
    except (ImportError, TypeError) as error:
        seam.pass_on(error)
        return None


def stamp(profile: Any, subject: dict[str, Any]) -> None:
    """Write `subject` under the key `autoprof` of the active recording. torch drops metadata after the stop."""
    try:
        profile.add_metadata_json("autoprof", json.dumps(subject))
    except (AttributeError, RuntimeError, TypeError) as error:  # another release of torch
        seam.pass_on(error)
        log.warning_once(f"the trace can't be labelled with its step and rank: {type(error).__name__}: {error}")


def mark(name: str) -> Callable[[], None]:
    """Begin a range in the trace. Return the function that ends it.

    `record_function` would call two operators, which the program's dispatch modes, `make_fx` and `torch.jit.trace` see.
    These functions record the same range without the dispatcher (torch 1.8 and later).
    """
    from torch.autograd import _record_function_with_args_enter, _record_function_with_args_exit

    handle = _record_function_with_args_enter(name)
    _note(handle)
    return functools.partial(_record_function_with_args_exit, handle)


def _watch_ranges() -> None:
    """Note the ranges that begin from now on."""
    _end_ranges()
    record_function = _record_function()
    original = vars(record_function).get("__enter__")
    if isinstance(original, FunctionType):  # it may be a mock of the program
        wrapper = _noting(original)
        record_function.__enter__ = wrapper
        _state.enter = wrapper, original


def _note(handle: Any) -> None:
    """Note a range that has begun. `handle` is what torch returned for it."""
    key = id(handle)
    # First noted, then moved, so that an interrupt between the two loses no range.
    _state.entered[key] = weakref.ref(handle)
    _state.entered.move_to_end(key)


def _end_ranges() -> None:
    """End the noted ranges, the last one first, and note no more."""
    patched, _state.enter = _state.enter, None
    if patched is not None and vars(record_function := _record_function()).get("__enter__") is patched[0]:
        record_function.__enter__ = patched[1]
    while _state.entered:
        _end(_state.entered.popitem()[1]())


def _end_all_ranges() -> None:
    """End all open ranges of the process, also ranges that began under a profiler of the program.

    autoprof has not noted the latter, so this looks at all objects of the process (0.1 s per million).
    """
    record_function = _record_function()
    for candidate in gc.get_objects():
        if issubclass(type(candidate), record_function):
            _end(getattr(candidate, "record", None))


def _record_function() -> Any:
    from torch.autograd.profiler import record_function

    return record_function


def _end(handle: Any) -> None:
    import torch

    if type(handle) is torch.ScriptObject:
        # It calls no operator, unlike `record_function.__exit__`: the program's dispatch modes would see that.
        torch.autograd._record_function_with_args_exit(handle)


def _noting(enter: Callable[[Any], Any]) -> Callable[[Any], Any]:
    import torch

    enabled, kind, handle_type = torch.autograd._profiler_enabled, torch._C._autograd._profiler_type, torch.ScriptObject
    kineto = torch._C._profiler.ActiveProfilerType.KINETO

    @functools.wraps(enter)
    def __enter__(self: Any) -> Any:
        entered = enter(self)
        if enabled() and kind() == kineto:
            handle = getattr(self, "record", None)
            if type(handle) is handle_type:
                _note(handle)
        return entered

    return __enter__
