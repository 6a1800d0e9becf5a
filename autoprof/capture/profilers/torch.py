"""torch.profiler as a tool.

The end of a range (`record_function`) writes into the recording in which the range began. If that recording has ended
and another recording is on, the end of the range writes to freed memory, and the process crashes or hangs (torch 2.13,
`onFunctionExit` in torch/csrc/autograd/profiler_kineto.cpp). If a range ends twice, the second end does nothing.

So autoprof ends all open ranges before it ends its own recording. If a profiler of the program has ended, autoprof also
ends all open ranges before it starts its next recording.
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

# torch's names for the words of AUTOPROF_CONTENTS: of activities, and of parameters of `torch.profiler.profile`.
DEVICES = {"cpu": "cpu", "cuda": "cuda", "npu": "privateuse1"}
FLAGS = {
    "shapes": "record_shapes",
    "memory": "profile_memory",
    "stack": "with_stack",
    "flops": "with_flops",
    "module": "with_modules",
}
# If a module moved while shapes were recorded, `left_out` of the meta file contains this word (module_moves.py).
MOVES = "torch.module-moves"
# Maximum number of bytes after the last event of a trace. These bytes contain the metadata that Kineto got.
MAX_TAIL_BYTES = 65536
# Profiles whose results are not written yet. A profile is in a reference cycle, so the garbage collector may free the
# result at any time. If the result is freed during or after a later recording, the process crashes (torch 2.13,
# libkineto's MemoryTraceLogger). So this list keeps a result until it is written. Then the result is freed at once,
# before the next recording.
_unwritten: list[Any] = []


class _TorchState(process.State):
    """The open ranges of autoprof's recording, and whether torch has recorded in this process.

    Attributes:
        recorded: True once autoprof has recorded with torch in this process.
        entered: Weak references to the handles of the ranges that began in autoprof's recording, in the order of their
            begins, as a dict from the handle's `id`. If a handle is freed, torch ends its range.
        enter: autoprof's wrapper of `record_function.__enter__`, and the method that it wraps. None if the method is
            not wrapped.
    """

    recorded = False

    def begin(self) -> None:
        self.entered: OrderedDict[int, weakref.ref[Any]] = OrderedDict()
        self.enter: tuple[Callable[[Any], Any], Callable[[Any], Any]] | None = None

    def in_child(self) -> None:
        """If the parent process has recorded, let this forked child end without Kineto's destructors.

        The destructors wait for threads that do not exist in a forked child. So they hang or abort (torch 2.13).

        At the exit, glibc calls the registered functions in reverse order and passes the exit status to them. So
        `fcloseall` flushes the files first, and then `_exit` ends the process. `os._exit` ends children of
        multiprocessing in the same way.
        """
        if self.recorded:
            with seam.suppress(ImportError, OSError, AttributeError):  # a libc without these functions
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
        # The class is not imported from `torch.profiler`, because SGLang replaces `torch.profiler.profile` by the class
        # of torch_npu (0.5.8, scheduler_profiler_mixin.py).
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
        # True if torch has set its profile function in this thread. Then `stop` checks whether it is still set.
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
            # The program may keep the traceback of the interrupt, which refers to torch's objects. So the results are
            # freed here.
            if getattr(self._profile, "profiler", None) is not None:
                self._profile.profiler.kineto_results = None
            _forget(self._profile)
            self._profile = None
        foreign.own(False)

    def export(self, path: str) -> None:
        """Write the trace, in any thread.

        Raises:
            OSError: The trace is incomplete. Kineto does not report this error. Kineto writes to a `.tmp` file and
                renames the file, even if it could not write the last part of its buffer (torch 2.13).
        """
        try:
            self._profile.export_chrome_trace(path)
        finally:
            _forget(self._profile)
            self._profile = None
        if not _complete(path):
            limit = files.size_limit()
            cause = "" if limit is None else f", or the trace over the limit of file sizes, {limit} bytes (ulimit -f)"
            raise OSError(f"torch could not write the whole trace; is the disk full{cause}?")

    def busy(self) -> str:
        return foreign.busy()


def _trace_id() -> str:
    """Return an id for a trace. torch's default is `uuid.uuid4`, which the program may have mocked."""
    return os.urandom(16).hex().upper()


def _forget(profile: Any) -> None:
    """Free the result of a profile."""
    with seam.suppress(ValueError):  # the result is freed already (`_end_and_free`)
        _unwritten.remove(profile)
    profile.profiler = None


def _enabled() -> bool:
    """Return True if torch records this thread, for autoprof or for the program."""
    from torch.autograd import _profiler_enabled

    return bool(_profiler_enabled())


def _disable() -> None:
    """End torch's recording of this thread and discard it."""
    _end_ranges()
    if _enabled():
        from torch.autograd import _disable_profiler, profiler

        _disable_profiler()
        if hasattr(profiler, "_is_profiler_enabled"):  # normally, `profile.stop` resets this flag
            profiler._is_profiler_enabled = False


def _end_and_free(reason: str) -> bool:
    """End and free autoprof's recordings of torch in this process, also results that are not written yet.

    Args:
        reason: Reason for the meta file.

    Returns:
        True if recordings were freed. False if there were none, or if a profiler of the program is on.
    """
    if foreign.known() or not (_unwritten or _enabled()) or not foreign.end_own(reason):
        return False
    for profile in list(_unwritten):
        _forget(profile)
    return True


def _complete(path: str) -> bool:
    """Return True if a Chrome trace of Kineto is complete: both its list of events and its JSON object are closed."""
    if not files.exists(path):
        return False
    with io.open(path, "rb", opener=files.descriptor) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - MAX_TAIL_BYTES))
        tail = file.read(MAX_TAIL_BYTES)
    return b"\n  ]" in tail and tail.rstrip().endswith(b"}")


def profile_arguments(contents: tuple[str, ...]) -> tuple[dict[str, Any], list[str]]:
    """Return the arguments of `torch.profiler.profile` for `contents`.

    If `contents` names no device, the recording contains the host and every device for which torch was built.

    Args:
        contents: Words of `AUTOPROF_CONTENTS`.

    Returns:
        The arguments, as a dict from parameter to value, and the contents that this build of torch will record.
    """
    import torch.profiler

    activities = {activity.name.lower(): activity for activity in torch.profiler.supported_activities()}
    if "torch_npu" in sys.modules:
        # torch_npu has its own profiler. autoprof uses torch's profiler in processes that use no NPU. If torch recorded
        # the NPU in such a process, the process would take an NPU.
        activities.pop(DEVICES["npu"], None)
    devices = [name for name in DEVICES if DEVICES[name] in activities]
    if any(word in DEVICES for word in contents):
        devices = [name for name in devices if name in contents] or ["cpu"]
    flags = [word for word in contents if word in FLAGS]
    arguments = {"activities": [activities[DEVICES[name]] for name in devices]} | {FLAGS[word]: True for word in flags}
    if "stack" not in flags:  # torch refuses this config if stacks are recorded
        arguments["experimental_config"] = _trace_only()
    return arguments, devices + flags


def _trace_only() -> Any:
    """Return the config `trace_only`, or None if this release of torch does not have it.

    With this config, the stop of the profiler makes no Python objects of the events. The objects take a third of the
    stop's time (torch 2.13).
    """
    try:
        from torch._C._profiler import _ExperimentalConfig

        return _ExperimentalConfig(trace_only=True)
    except (ImportError, TypeError) as error:
        seam.pass_on(error)
        return None


def stamp(profile: Any, subject: dict[str, Any]) -> None:
    """Write `subject` into the metadata of the trace, under the key `autoprof`.

    Call this while the recording is on, because torch drops metadata that it gets after the stop.
    """
    try:
        profile.add_metadata_json("autoprof", json.dumps(subject))
    except (AttributeError, RuntimeError, TypeError) as error:  # another release of torch
        seam.pass_on(error)
        log.warning_once(f"the trace can't be labelled with its step and rank: {type(error).__name__}: {error}")


def mark(name: str) -> Callable[[], None]:
    """Begin a range in the trace. Return the function that ends it.

    `record_function` would call two operators. The program's dispatch modes, `make_fx` and `torch.jit.trace` would see
    these operators. So this function calls two lower functions of torch, which record the same range without the
    dispatcher (torch 1.8 and later).
    """
    from torch.autograd import _record_function_with_args_enter, _record_function_with_args_exit

    handle = _record_function_with_args_enter(name)
    _note(handle)
    return functools.partial(_record_function_with_args_exit, handle)


def _watch_ranges() -> None:
    """From now on, note each range that begins, so that `_end_ranges` can end it."""
    _end_ranges()
    record_function = _record_function()
    original = vars(record_function).get("__enter__")
    if isinstance(original, FunctionType):  # the program may have replaced the method by a mock
        wrapper = _noting(original)
        record_function.__enter__ = wrapper
        _state.enter = wrapper, original


def _note(handle: Any) -> None:
    """Note a range that has begun. `handle` is torch's handle of the range."""
    key = id(handle)
    # The range is noted first and moved to the end second. So an interrupt between the two lines loses no range.
    _state.entered[key] = weakref.ref(handle)
    _state.entered.move_to_end(key)


def _end_ranges() -> None:
    """End the noted ranges, in the reverse order of their begins, and stop noting ranges."""
    enter, _state.enter = _state.enter, None
    if enter is not None and vars(record_function := _record_function()).get("__enter__") is enter[0]:
        record_function.__enter__ = enter[1]
    while _state.entered:
        _end(_state.entered.popitem()[1]())


def _end_all_ranges() -> None:
    """End all open ranges of the process, also ranges that began while a profiler of the program recorded.

    autoprof has not noted the ranges of the program's profiler. So this function searches all objects of the process
    (0.1 s per million objects).
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
        # `record_function.__exit__` would call an operator, which the program's dispatch modes would see. This function
        # calls no operator.
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
