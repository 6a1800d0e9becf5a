"""torch.profiler as a tool.

The end of a range (`record_function`) writes into the recording in which the range began. If that recording has ended
and another recording is on, the end of the range writes to freed memory, and the process crashes or hangs (torch 2.13,
`onFunctionExit` in torch/csrc/autograd/profiler_kineto.cpp). If a range ends twice, the second end does nothing.

So autoprof ends all open ranges before it ends its own recording. If a profiler of the program has ended, autoprof also
ends all open ranges before it starts its next recording.

A recording with shapes keeps weak references to the tensors of each operator, until the result of the recording is
freed. A recording with stacks may keep weak references to parameters. `torch.utils.swap_tensors` refuses tensors that
have weak references, and so does `Module.to` for the parameters of `fully_shard` (torch 2.13, `InputOutputEncoder` in
torch/csrc/profiler/collection.h; `THPVariable` in torch/csrc/autograd/python_variable.cpp).

Therefore autoprof does not record the operators of a module's move. If a recording still refers to a parameter that the
program swaps, autoprof ends and frees the recording first.
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

from autoprof.base import files, log, process, seam
from autoprof.base.originals import io, json, os, threading
from autoprof.capture.profilers import Tool, accepted, foreign
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
# If a module moved while shapes were recorded, `left_out` of the meta file contains this word.
MOVES = "torch.module-moves"
# _HELD: contents with which a recording refers to the tensors of operators (`with_flops` also records shapes).
# _REFERRED: contents with which a recording may refer to parameters.
_HELD = frozenset(("shapes", "flops"))
_REFERRED = _HELD | {"stack"}
# Maximum number of bytes after the last event of a trace. These bytes contain the metadata that Kineto got.
MAX_TAIL_BYTES = 65536
# Profiles whose results are not written yet. A profile is in a reference cycle, so the garbage collector may free the
# result at any time. If the result is freed during or after a later recording, the process crashes (torch 2.13,
# libkineto's MemoryTraceLogger). So this list keeps a result until it is written. Then the result is freed at once,
# before the next recording.
_unwritten: list[Any] = []


class _TorchState(process.State):
    """The open ranges and moves of autoprof's recording, and whether torch has recorded in this process.

    Attributes:
        recorded: True once autoprof has recorded with torch in this process.
        entered: Weak references to the handles of the ranges that began in autoprof's recording, in the order of their
            begins, as a dict from the handle's `id`. If a handle is freed, torch ends its range.
        enter: autoprof's wrapper of `record_function.__enter__`, and the method that it wraps. None if the method is
            not wrapped.
        moves_watched: True once torch's functions that move a module are wrapped. They stay wrapped.
        held: Id of the thread that is recorded with shapes, and the tool that records. None if no thread is recorded
            with shapes.
    """

    recorded = False
    moves_watched = False

    def reset(self) -> None:
        self.entered: OrderedDict[int, weakref.ref[Any]] = OrderedDict()
        self.enter: tuple[Callable[[Any], Any], Callable[[Any], Any]] | None = None
        self.held: tuple[int, TorchTool] | None = None

    def after_fork_in_child(self) -> None:
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
_moving = threading.local()


class KinetoTool(Tool):
    """Base class of the tools whose profilers use torch's ranges and metadata: torch.profiler and torch_npu's."""

    _profile: Any = None

    def busy(self) -> str:
        return foreign.busy()

    def stamp(self, subject: dict[str, Any]) -> None:
        """Write `subject` into the metadata of the trace, under the key `autoprof`.

        Call this while the recording is on, because torch drops metadata that it gets after the stop.
        """
        try:
            self._profile.add_metadata_json("autoprof", json.dumps(subject))
        except (AttributeError, RuntimeError, TypeError) as error:  # another release of torch
            seam.pass_on(error)
            log.warning_once(f"the trace can't be labelled with its step and rank: {type(error).__name__}: {error}")

    def mark(self, name: str) -> Callable[[], None]:
        """Begin a range in the trace. Return the function that ends it.

        `record_function` would call two operators. The program's dispatch modes, `make_fx` and `torch.jit.trace` would
        see these operators. So this method calls two lower functions of torch, which record the same range without the
        dispatcher (torch 1.8 and later).
        """
        from torch.autograd import _record_function_with_args_enter, _record_function_with_args_exit

        handle = _record_function_with_args_enter(name)
        _note(handle)
        return functools.partial(_record_function_with_args_exit, handle)


class TorchTool(KinetoTool):
    """Tool that records with `torch.profiler.profile` and writes a Chrome trace."""

    name = "torch"
    ending = file_names.TRACE.removesuffix(".gz")
    _stacks = False

    def start(self, settings: Settings, raw: Path) -> list[str]:
        _state.recorded = True
        contents, self.remark = foreign.without_stacks(settings.contents)
        arguments, used = profile_arguments(contents)
        # The class is not imported from `torch.profiler`, because SGLang replaces `torch.profiler.profile` by the class
        # of torch_npu (0.5.8, scheduler_profiler_mixin.py).
        from torch.profiler.profiler import profile

        self._profile = profile(**arguments, **accepted(profile, {"custom_trace_id_callback": _trace_id}))
        if _REFERRED.intersection(used):
            _watch_moves()
        if foreign.has_ended():
            _end_all_ranges()
        try:
            _watch_ranges()
            foreign.note_own_call(True)
            process.with_signals_blocked(self._profile.start)  # at the first start, Kineto starts a thread
        finally:
            foreign.note_own_call(False)
        # True if torch has set its profile function in this thread. Then `stop` checks whether it is still set.
        self._stacks = "stack" in used and sys.getprofile() is not None
        if _HELD.intersection(used):
            _state.held = threading.get_ident(), self
        return used

    def stop(self) -> None:
        _unwritten.append(self._profile)
        try:
            foreign.note_own_call(True)
            _end_ranges()
            self._end()
        finally:
            foreign.note_own_call(False)
            _state.held = None

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
            _state.held = None
            # The program may keep the traceback of the interrupt, which refers to torch's objects. So the results are
            # freed here.
            if getattr(self._profile, "profiler", None) is not None:
                self._profile.profiler.kineto_results = None
            _free_result(self._profile)
            self._profile = None
        foreign.note_own_call(False)

    def export(self, path: str) -> None:
        """Write the trace, in any thread.

        Raises:
            OSError: The trace is incomplete. Kineto does not report this error. Kineto writes to a `.tmp` file and
                renames the file, even if it could not write the last part of its buffer (torch 2.13).
        """
        try:
            self._profile.export_chrome_trace(path)
        finally:
            _free_result(self._profile)
            self._profile = None
        if not _complete(path):
            limit = files.size_limit()
            cause = "" if limit is None else f", or the trace over the limit of file sizes, {limit} bytes (ulimit -f)"
            raise OSError(f"torch could not write the whole trace; is the disk full{cause}?")


def _trace_id() -> str:
    """Return an id for a trace. torch's default is `uuid.uuid4`, which the program may have mocked."""
    return os.urandom(16).hex().upper()


def _free_result(profile: Any) -> None:
    """Free the result of a profile."""
    with seam.suppress(ValueError):  # the result is freed already (`_end_and_free`)
        _unwritten.remove(profile)
    profile.profiler = None


def _disable() -> None:
    """End torch's recording of this thread and discard it."""
    _end_ranges()
    if foreign.is_recording():
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
    if foreign.known() or not (_unwritten or foreign.is_recording()) or not foreign.end_own(reason):
        return False
    for profile in list(_unwritten):
        _free_result(profile)
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


def _watch_ranges() -> None:
    """From now on, note each range that begins, so that `_end_ranges` can end it."""
    from torch.autograd.profiler import record_function

    _end_ranges()
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
    from torch.autograd.profiler import record_function

    enter, _state.enter = _state.enter, None
    if enter is not None and vars(record_function).get("__enter__") is enter[0]:
        record_function.__enter__ = enter[1]
    while _state.entered:
        _end(_state.entered.popitem()[1]())


def _end_all_ranges() -> None:
    """End all open ranges of the process, also ranges that began while a profiler of the program recorded.

    autoprof has not noted the ranges of the program's profiler. So this function searches all objects of the process
    (0.1 s per million objects).
    """
    from torch.autograd.profiler import record_function

    for candidate in gc.get_objects():
        if issubclass(type(candidate), record_function):
            _end(getattr(candidate, "record", None))


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


def _watch_moves() -> None:
    """Wrap torch's functions in this process so that a module can move during each recording."""
    if not _state.moves_watched:
        _state.moves_watched = True
        import torch

        if hasattr(torch._C, "_swap_tensor_impl"):
            torch._C._swap_tensor_impl = _swapping(torch._C._swap_tensor_impl)
        if hasattr(torch.autograd, "_enable_record_function"):
            torch.nn.Module._apply = _moved(torch.nn.Module._apply)


def _swapping(swap: Callable[..., None]) -> Callable[..., None]:
    # torch's `swap` checks the tensors before it changes anything. So it may be called a second time after an error.
    # `swap_tensors` first swaps attributes, so it must not be called twice.
    import torch

    compiling = torch.compiler.is_compiling

    @functools.wraps(swap)
    def swap_impl(*tensors: Any) -> None:
        if compiling():
            return swap(*tensors)
        try:
            return swap(*tensors)
        except RuntimeError as error:
            seam.pass_on(error)
            if not _end_and_free("the program swaps a parameter, which torch refuses during a recording"):
                raise
        return swap(*tensors)

    return swap_impl


def _moved(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper of `Module._apply` that records no operators while the recording thread moves a module."""
    import torch

    record: Callable[[bool], None] = torch.autograd._enable_record_function
    # torch.compile must trace only the user's code, so the wrapper does nothing while torch.compile traces.
    compiling = torch.compiler.is_compiling

    @functools.wraps(apply)
    def _apply(*args: Any, **kwargs: Any) -> Any:
        held = None if compiling() else _state.held
        if held is None or held[0] != threading.get_ident() or getattr(_moving, "now", False):
            return apply(*args, **kwargs)
        held[1].lost = [MOVES]
        _moving.now = True
        record(False)
        try:
            return apply(*args, **kwargs)
        finally:
            record(True)
            _moving.now = False

    return _apply
