"""Detection of other profilers: the program's profilers and profile functions, and other users of CUPTI.

autoprof's captures give way to profilers and profile functions that the program starts.

CUPTI is the library with which torch.profiler records the GPU. A process has only one CUPTI subscription. If Kineto
gets none, it reports no error: the trace contains the events of the host and no kernels. Some CUDA images set
`NVTX_INJECTION64_PATH` to libcupti. In such an image, the first NVTX range of a process takes the subscription (verl
0.9.1, trainer/constants_ppo.py).
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import wrapt

from autoprof import _boot
from autoprof.base import log, process, seam
from autoprof.base.originals import os, threading, time

# Name of the type of the profile function that torch sets while it records stacks.
_TORCH = "TraceContext"
ENDED_EARLY = "stack ends where the program set a profile function (cProfile, sys.setprofile)"


def without_stacks(contents: tuple[str, ...], stacks: Sequence[str] = ("stack",)) -> tuple[tuple[str, ...], str]:
    """If the program has set a profile function, remove the words in `stacks` from the contents.

    Python shows the profile function of this thread and the one for new threads. It does not show the profile functions
    of other running threads.

    Args:
        contents: Words of `AUTOPROF_CONTENTS`.
        stacks: Words for which the profiler sets its own profile function.

    Returns:
        The remaining contents. If words were removed, also the reason; otherwise an empty text.
    """
    left_out = [word for word in contents if word in stacks]
    if not left_out:
        return contents, ""
    function = own_function()
    function = threading.getprofile() if function is None else function
    if function is None:
        return contents, ""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    reason = f"{', '.join(left_out)} is left out: the program has set the profile function {name}, which torch removes"
    log.warning_once(reason)
    return tuple(word for word in contents if word not in stacks), reason


def own_function() -> Any:
    """Return the profile function that the program has set in this thread. Return None if it has set none."""
    function = sys.getprofile()
    return None if type(function).__name__ == _TORCH else function


@contextlib.contextmanager
def kept_function() -> Iterator[None]:
    """Remove the program's profile function from this thread, and restore it after the `with` block.

    In the block, the caller ends a recording with stacks.
    """
    function = own_function()
    if function is None:
        yield
        return
    sys.setprofile(None)
    try:
        yield
    finally:
        _set(function)


def _set(function: Any) -> None:
    """Set a profile function of the program again. For cProfile, call `enable`, which keeps the counts."""
    if hasattr(function, "enable"):
        function.enable()
    elif callable(function):
        sys.setprofile(function)
    else:
        log.warning(f"the profiler {type(function).__qualname__} was ended by torch, which recorded stacks")


# Names of the functions that start and end torch's profilers, by the module that calls the functions (torch 2.13).
# `torch.profiler` uses the first module. A profiler uses Kineto only if it calls `_PREPARE`; `emit_nvtx` does not.
_PREPARE, _DISABLE, _DISABLE_LEGACY = "_prepare_profiler", "_disable_profiler", "_disable_profiler_legacy"
_FUNCTIONS = {
    "torch.autograd.profiler": (_PREPARE, "_enable_profiler", _DISABLE),
    "torch.autograd.profiler_legacy": ("_enable_profiler_legacy", _DISABLE_LEGACY),
}
# Name of the clock that `torch.autograd.profiler` reads when a profiler starts and ends (torch 2.13).
_CLOCK = "perf_counter_ns"
_TORCH_NPU = "torch_npu.profiler.profiler"
# Stands for the id of a thread that is not known.
_UNKNOWN = 0
# Stands for the result of a function that has not returned.
_unset: Any = object()


class _ForeignState(process.State):
    """The profilers that the program has started in this process, and the function that makes way for them.

    Attributes:
        clock: Function that autoprof has set in torch's module in place of a frozen clock, if any.
        interrupt: Function that ends autoprof's recording, once `watch` was called. Its arguments are the reason, and
            True if it must also end a recording that another thread began.
        threads: Ids of the threads in which the program has prepared or started Kineto and has not ended it.
        npu: The program's profilers of torch_npu that are on.
        ended: True if a torch profiler of the program has ended since the last call of `has_ended`.
    """

    clock: Callable[[], int] | None = None
    interrupt: Callable[[str, bool], None] | None = None

    def reset(self) -> None:
        self.threads: set[int] = set()
        self.npu: weakref.WeakSet[Any] = weakref.WeakSet()
        self.ended = False

    def after_fork_in_child(self) -> None:
        self.threads &= {threading.get_ident()}


class _Own(threading.local):
    """The state of autoprof's own profiler in this thread.

    Attributes:
        called: True while autoprof starts or ends its profiler in this thread.
        left_on: True if torch recorded this thread after autoprof last started or ended its profiler in this thread.
            This stays true if another thread ends the recording: torch still records this thread for autoprof then.
    """

    called = False
    left_on = False


_state = _ForeignState()
_own = _Own()


def note_own_call(is_before: bool) -> None:
    """Note that autoprof starts or ends its own profiler in this thread.

    Args:
        is_before: True before the start or the end, False after it.
    """
    module = sys.modules.get("torch.autograd.profiler")
    frozen = getattr(module, _CLOCK, time.perf_counter_ns)
    if is_before and frozen is not time.perf_counter_ns and frozen is not _state.clock:
        _unfreeze_clock(module, frozen)
    _own.called = is_before
    if not is_before:
        _own.left_on = is_recording()


def _unfreeze_clock(module: Any, frozen: Callable[[], int]) -> None:
    """Make torch read the real clock while autoprof starts or ends its own profiler.

    The program may have frozen the clock in torch's module with freezegun. If torch reads the frozen clock, the clock
    may advance (`auto_tick_seconds`), and the program would see the change. When the program thaws the clock, freezegun
    also replaces the function that is set here.

    Args:
        module: `torch.autograd.profiler`.
        frozen: freezegun's replacement of the clock.
    """

    def perf_counter_ns() -> int:
        now: int = time.perf_counter_ns() if _own.called else frozen()
        return now

    _state.clock = perf_counter_ns
    setattr(module, _CLOCK, perf_counter_ns)


def known() -> str:
    """If a profiler that the program has started is on, return its description. Otherwise return an empty text."""
    if _state.threads:
        return "another torch profiler"
    return "another torch_npu profiler" if _state.npu else ""


def busy() -> str:
    """If a profiler of the program is on, return a text that names the profiler. Otherwise return an empty text.

    While it is on, autoprof can't record in this thread.
    """
    name = known() or ("another torch profiler" if is_recording() and not _own.left_on else "")
    return f"{name} is on in this process" if name else ""


def has_ended() -> bool:
    """Return True if a torch profiler of the program has ended since the last call of this function."""
    ended, _state.ended = _state.ended, False
    return ended


def is_recording() -> bool:
    """Return True if torch records this thread, for autoprof or for the program.

    torch does not report a recording by `profile_all_threads` and the warm-up of a profiler, so both give False.
    """
    autograd = sys.modules.get("torch.autograd")
    return autograd is not None and bool(autograd._profiler_enabled())


def watch(interrupt: Callable[[str, bool], None]) -> None:
    """From the import of torch or torch_npu on, call `interrupt` before the program starts a profiler.

    Args:
        interrupt: Function that ends autoprof's recording. Its arguments are the reason, and True if a recording that
            another thread began is to end, too.
    """
    if _state.interrupt is None:
        _state.interrupt = interrupt
        for name in _FUNCTIONS:
            _boot.when_imported(name, watch_torch)
        _boot.when_imported(_TORCH_NPU, watch_npu)


def watch_torch(module: Any) -> None:
    """In one of torch's modules, wrap the functions that start and end profilers."""
    for name in _FUNCTIONS[module.__name__]:
        function = vars(module).get(name)
        if function is None:
            log.warning_once(f"other users of {module.__name__} can't be detected: it has no {name}")
        else:
            setattr(module, name, _watched(function, name))
    if getattr(module, "_is_profiler_enabled", False):  # a profiler is already on, perhaps in another thread
        _state.threads.add(threading.get_ident() if is_recording() else _UNKNOWN)


def _watched(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if _own.called:
            return function(*args, **kwargs)
        was_on, result = is_recording(), _unset
        try:
            if name == _PREPARE:  # noted before autoprof's recording ends, so that autoprof begins no new recording
                _state.threads.add(threading.get_ident())
            if name in (_DISABLE, _DISABLE_LEGACY):
                _state.ended = True
            else:
                _make_way("torch", any_thread=name == _PREPARE)
            result = function(*args, **kwargs)
        finally:
            if result is _unset and not is_recording():  # the function has raised an exception
                _state.threads.discard(threading.get_ident())
        if name == _DISABLE:
            _note_end(was_on)
        return result

    return watched


def _note_end(was_on: bool) -> None:
    """Note that a profiler of the program has ended.

    Args:
        was_on: True if torch recorded this thread before the profiler ended.
    """
    thread = threading.get_ident()
    if thread not in _state.threads:
        _state.threads.discard(_UNKNOWN)
        if not was_on:  # the profiler recorded all threads, so any thread may end it
            _state.threads.clear()
    elif not is_recording():
        _state.threads.discard(thread)


def watch_npu(module: Any) -> None:
    """Wrap the methods of torch_npu's profiler class that start and stop a profiler."""
    try:
        wrapt.wrap_function_wrapper(module, "profile.start", _start)
        wrapt.wrap_function_wrapper(module, "profile.stop", _stop)
    except AttributeError as error:  # another release of torch_npu
        seam.pass_on(error)
        log.warning_once(f"other users of {module.__name__} can't be detected: {type(error).__name__}: {error}")


def _start(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    if not _own.called:
        _make_way("torch_npu", any_thread=True)
        _state.npu.add(instance)
    return wrapped(*args, **kwargs)


def _stop(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    _state.npu.discard(instance)
    return wrapped(*args, **kwargs)


def end_own(reason: str, any_thread: bool = True) -> bool:
    """End autoprof's recording in this process, if it is on.

    Args:
        reason: Reason for the meta file.
        any_thread: True to end also a recording that another thread began.

    Returns:
        True if the recording was ended. False if `watch` was not called in this process, or after an error.
    """
    if _state.interrupt is None:
        return False
    with seam.guard("a capture could not make way for the program", log.error_once):
        _state.interrupt(reason, any_thread)
        return True
    return False


def _make_way(package: str, any_thread: bool) -> None:
    end_own(f"another {package} profiler was started in this process", any_thread)


INJECTION = "NVTX_INJECTION64_PATH"
# Value for `INJECTION` that NVTX can't load, so that NVTX takes no subscription. The value must not be empty, because
# start-up hooks of images replace an empty value.
NOTHING = "/nonexistent/autoprof-no-nvtx-injection.so"
KEEP = "AUTOPROF_KEEP_NVTX_INJECTION"
# Variables by which the user keeps the library that NVTX loads. The second variable is verl's.
_KEEPING = (KEEP, "VERL_KEEP_NVTX_INJECTION")
_CUDA_INJECTION = "CUDA_INJECTION64_PATH"
_DYNOLOG = "KINETO_USE_DAEMON"


def names_cupti(environ: Mapping[str, str]) -> bool:
    """Return True if NVTX loads libcupti in a process with this environment."""
    return "cupti" in os.path.basename(environ.get(INJECTION, ""))


def keeps_injection(environ: Mapping[str, str]) -> bool:
    """Return True if the user has set a variable to keep the library that NVTX loads."""
    return any(environ.get(name) == "1" for name in _KEEPING)


def free_cupti(tools: Sequence[str], environ: MutableMapping[str, str]) -> bool:
    """If NVTX would take CUPTI in this process and its children, change the environment to prevent it.

    Every process calls this, because nodes may have different images. If NVTX loads another library than libcupti, such
    as the library of Nsight Systems, the environment is not changed.

    Args:
        tools: The value of `AUTOPROF_TOOL`.
        environ: The environment to change.

    Returns:
        True if the environment was changed.
    """
    if "nsys" in tools or not names_cupti(environ) or keeps_injection(environ):
        return False
    environ[INJECTION] = NOTHING
    return True


def expects_gpu_events(contents: Sequence[str]) -> bool:
    """Return True if the contents of a recording include the GPU, and this process uses CUDA."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return "cuda" in contents and cuda is not None and bool(cuda.is_initialized())


def cupti_suspicion(environ: Mapping[str, str]) -> str:
    """Return the probable reason why a recording of torch in this process has no GPU events.

    Nsight Systems is never the reason: in a process under nsys, autoprof does not record with torch
    (`profilers.choose`).
    """
    if names_cupti(environ):
        return f"{INJECTION} names libcupti, which takes the only CUPTI subscription of the process; unset it"
    injected_library = os.path.basename(environ.get(_CUDA_INJECTION, ""))
    if injected_library:
        return f"{_CUDA_INJECTION} loads {injected_library}, which may have taken the only CUPTI subscription"
    if _DYNOLOG in environ:  # any value counts, even 0 (pytorch/pytorch #112389)
        return f"{_DYNOLOG} is set: a recording that dynolog asked for may have taken CUPTI"
    return "the GPU had nothing to do, or other code in the process had taken CUPTI before"
