"""Nsight Systems: the command line of `nsys`, and windows and ranges in a process that runs under it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autoprof.base import files, interrupts, log, process
from autoprof.base.originals import io, json, os, shutil, subprocess
from autoprof.config.settings import Settings
from autoprof.config.tool_options import NsysOptions
from autoprof.rundir import file_names

# As Ray's plug-in takes it: %p is the process that is recorded, as nsys and the process itself know it.
OUTPUT = "autoprof_%p"
# Ray's plug-in knows it by no other name (Ray 2.60, runtime_env/nsight.py, parse_nsight_config).
EXECUTABLE = "nsys"
_TIMEOUT_S = 30
AT_THE_END = (
    "this nsys writes its reports only when the recorded process ends, and Ray may kill that process first; "
    "install an nsys whose `nsys profile --help` lists repeat[:N][:mode]"
)


def profile_options(options: NsysOptions) -> dict[str, str]:
    """Return the options of `nsys profile`, by their long names.

    `repeat` without a number: a run may have more windows than it begins with (`autoprof trigger`), and nsys stops to
    record after the last that it was promised. Left to itself nsys writes all reports when the process ends, which is
    when Ray kills it (ray#66129); with `async` each after its window. nsys neither ends the process with a window
    (`kill`), nor waits for what the process leaves behind, which waits for nsys itself.
    """
    chosen = {
        "trace": options.trace.replace("+", ","),
        "sample": options.sample,
        "cpuctxsw": options.sample,
        "capture-range": "cudaProfilerApi",
        "capture-range-end": "repeat:async" if writes_at_once(find_nsys(options)) else "repeat",
        "kill": "none",
        "wait": "primary",
        "stop-on-exit": "true",
        "force-overwrite": "true",
    }
    if options.python_backtrace:
        chosen["python-backtrace"] = "cuda"
    if options.gpu_metrics != "none":
        chosen["gpu-metrics-devices"] = options.gpu_metrics.replace("+", ",")
    return chosen


def find_nsys(options: NsysOptions) -> str:
    """Return the path of `nsys`, or an empty text where there is none."""
    return shutil.which(options.executable) or ""


@functools.cache
def writes_at_once(executable: str) -> bool:
    """Return whether an `nsys` can write reports while the process goes on: its help names modes of `repeat`."""
    return "[:mode]" in _said(executable, "profile", "--help")


def nsys_folder(options: NsysOptions) -> list[str]:
    """Return the folder of an `nsys` that is not the first on the path, as Ray's plug-in needs it."""
    found = find_nsys(options)
    return [os.path.dirname(found)] if found and found != shutil.which(EXECUTABLE) else []


def put_on_path(options: NsysOptions) -> None:
    """Have Ray's processes, which this one is about to start, find the `nsys` that was asked for."""
    os.environ["PATH"] = os.pathsep.join([*nsys_folder(options), os.environ.get("PATH", "")])


def nsys_version(executable: str) -> str:
    """Return the version that an `nsys` prints."""
    return _said(executable, "--version").strip().removeprefix("NVIDIA Nsight Systems version ") or "of unknown version"


def _said(executable: str, *arguments: str) -> str:
    """Return the output of an `nsys`, or an empty text where it does not run."""
    try:
        said = subprocess.run([executable, *arguments], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        interrupts.pass_on(error)
        return ""
    return said.stdout


# What autoprof gives an actor that it has Ray start under nsys: the `-o` of that nsys, where %p is the process.
REPORT = "AUTOPROF_NSYS_REPORT"
# What nsys sets in the processes that it starts; the injected library is there before the session has an id.
_SESSION = "NSYS_PROFILING_SESSION_ID"
_INJECTED = ("CUDA_INJECTION64_PATH", "LD_PRELOAD")
_LIBRARY = "libToolsInjection"


class _State(process.State):
    """The count of windows that this process has opened: nsys numbers their reports in this order, from 1."""

    def begin(self) -> None:
        self.windows = 0


_state = _State()


def here(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process runs under nsys, which then has CUPTI."""
    injected = any(_LIBRARY in environ.get(name, "") for name in _INJECTED)
    return bool(environ.get(_SESSION) or environ.get(REPORT)) or injected


def report() -> str:
    """Return the path of the nsys that autoprof had Ray start here, without number and ending; or an empty text.

    Ray's plug-in puts `-o` into the folder of logs of the node's session (Ray 2.60, runtime_env/nsight.py).
    """
    pattern, worker = os.environ.get(REPORT, ""), sys.modules.get("ray._private.worker")
    if not pattern or worker is None or worker.global_worker.mode != worker.WORKER_MODE:
        return ""
    return os.path.join(worker._global_node.get_logs_dir_path(), "nsight", pattern.replace("%p", str(os.getpid())))


class NsysTool:
    """Opens and closes the windows that `nsys profile --capture-range=cudaProfilerApi` records.

    The reports of the windows come after their end, from nsys. Where autoprof had Ray start it, the process that
    finishes captures waits for them (`nsys_report.py`); elsewhere they stay where the user's own command has them.
    """

    name = "nsys"
    ending = file_names.NSYS_REPORT
    lost: Sequence[str] = ()
    remark = ""

    def __init__(self, asked: bool = True) -> None:
        """Make a tool; `asked`: whether the user wants autoprof to open windows in this session of nsys."""
        self._asked = asked
        # What the range of the stage is called besides; in captures of whole steps the step has a range of its own.
        self._prefix = ""
        self._whole_steps = False
        self._number = 0
        self._patience_s = 0.0

    @staticmethod
    def unavailable() -> str:
        """Return why this process can't be recorded by nsys, or an empty text."""
        return "" if here() else "this process does not run under nsys"

    def start(self, settings: Settings, raw: Path) -> list[str]:
        """Open a window.

        Raises:
            RuntimeError: This process has no CUDA yet. `cudaProfilerStart` would initialise it, on a device that the
                user may not have chosen so far (torch 2.13, torch/cuda/__init__.py, cudart).
        """
        import torch.cuda.profiler

        if not torch.cuda.is_initialized():
            raise RuntimeError("CUDA is not initialised in this process, so there is nothing for nsys to record")
        torch.cuda.profiler.start()
        _state.windows += 1
        self._number = _state.windows
        self._patience_s = settings.stop_timeout_s
        self._whole_steps = settings.mode == "continuous"
        return ["cpu", "cuda", *(["stack"] if settings.nsys.python_backtrace else [])]

    def stamp(self, subject: dict[str, Any]) -> None:
        self._prefix = "" if self._whole_steps else f"step {subject['global_step']} "
        try:
            import torch.cuda.nvtx

            torch.cuda.nvtx.mark(json.dumps({"autoprof": subject}))
        except Exception as error:
            interrupts.pass_on(error)
            log.warning_once(
                f"the range that names the capture could not be marked for nsys: {type(error).__name__}: {error}"
            )

    def mark(self, name: str) -> Callable[[], None]:
        """Begin an NVTX range; what is returned ends it, in any thread."""
        try:
            from torch.cuda import nvtx

            begun = nvtx.range_start(f"{self._prefix}{name}")
        except Exception as error:
            interrupts.pass_on(error)
            log.warning_once(f"ranges can't be marked for nsys: {type(error).__name__}: {error}")
            return _nothing
        self._prefix = ""
        return lambda: nvtx.range_end(begun)

    def stop(self) -> None:
        """Close the window, with all that was started on the device in it, as torch.profiler does."""
        import torch.cuda.profiler

        try:
            torch.cuda.synchronize()
        finally:
            torch.cuda.profiler.stop()

    def abort(self) -> None:
        if self._number:
            self.stop()

    def export(self, path: str) -> None:
        """Leave at `path` what the report of this window is known by."""
        known = {"report": report(), "number": self._number, "pid": os.getpid(), "patience_s": self._patience_s}
        with io.open(path, "w", encoding="utf-8", opener=files.descriptor) as file:
            json.dump(known, file)

    def busy(self) -> str:
        """Return why this process can't record: a child of an actor under nsys is in that actor's report, if at all."""
        if not self._asked:
            return "this process runs under nsys, which has CUPTI; AUTOPROF_TOOL=nsys opens windows for it"
        if os.environ.get(REPORT) and not report():
            return "nsys records the process that started this one, and its children with it"
        return ""


def _nothing() -> None:
    """Do nothing: there is no range to end."""
