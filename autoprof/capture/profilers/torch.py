"""torch.profiler as a tool."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from autoprof.base import files, log, process, seam, threads
from autoprof.base.originals import io, json, os
from autoprof.capture.profilers import foreign, module_moves, ranges
from autoprof.capture.profilers.arguments import taken
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
    """Recordings of torch in this process. `recorded`: True once torch has recorded."""

    recorded = False

    def in_child(self) -> None:
        """Make a forked child of a process that has recorded end without Kineto's destructors.

        They wait for threads that do not exist in a child, and hang or abort (torch 2.13). glibc calls the function
        registered last first, and passes it the exit status. So files are flushed, then `_exit` ends the process, as
        `os._exit` ends children of multiprocessing.
        """
        if self.recorded:
            with seam.suppress(Exception):
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

        self._profile = profile(**arguments, **taken(profile, {"custom_trace_id_callback": _trace_id}))
        if module_moves.REFERRED.intersection(used):
            module_moves.allow(_end_and_free)
        if foreign.has_ended():
            ranges.end_all()
        try:
            ranges.begin()
            foreign.own(True)
            threads.blocking(self._profile.start)  # at the first start, Kineto starts a thread
        except BaseException:  # as in `stop`
            _disable()
            raise
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
            ranges.end()
            self._end()
        except BaseException:
            # A signal or its handler interrupted this, and nothing else would end the recording.
            _disable()
            raise
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
        foreign.own(False)
        if self._profile is None:
            return
        _disable()
        module_moves.end()
        # The program may keep the traceback of the interrupt, and with it torch's objects.
        if getattr(self._profile, "profiler", None) is not None:
            self._profile.profiler.kineto_results = None
        _forget(self._profile)
        self._profile = None

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
    ranges.end()
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
    except Exception as error:
        seam.pass_on(error)
        log.warning_once(f"the trace can't be labelled with its step and rank: {type(error).__name__}: {error}")


def mark(name: str) -> Callable[[], None]:
    """Begin a range in the trace. Return the function that ends it.

    `record_function` would call two operators, which the program's dispatch modes, `make_fx` and `torch.jit.trace` see.
    These functions record the same range without the dispatcher (torch 1.8 and later).
    """
    from torch.autograd import _record_function_with_args_enter, _record_function_with_args_exit

    handle = _record_function_with_args_enter(name)
    ranges.note(handle)
    return partial(_record_function_with_args_exit, handle)
