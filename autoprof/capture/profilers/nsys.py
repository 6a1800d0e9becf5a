"""Nsight Systems: command line of `nsys`, and windows and ranges in a process that runs under it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autoprof.base import files, log, process, seam
from autoprof.base.originals import io, json, os, shutil, subprocess
from autoprof.capture.profilers import nothing
from autoprof.config.settings import Settings
from autoprof.config.values import NsysOptions
from autoprof.rundir import file_names

# Value of `-o` for Ray's plug-in. nsys replaces %p by the pid of the recorded process.
OUTPUT = "autoprof_%p"
# The only name that Ray's plug-in accepts (Ray 2.60, runtime_env/nsight.py, parse_nsight_config).
EXECUTABLE = "nsys"
_TIMEOUT_S = 30
AT_THE_END = (
    "this nsys writes its reports only when the recorded process ends, and Ray may kill that process first; "
    "install an nsys whose `nsys profile --help` lists repeat[:N][:mode]"
)


def profile_options(options: NsysOptions) -> dict[str, str]:
    """Return the options of `nsys profile` by their long names.

    `repeat` has no number, since nsys stops recording after that many windows, and `autoprof trigger` may add some.
    By default nsys writes all reports when the process ends, and Ray may kill it then (ray#66129). With `async` it
    writes each report after its window. With `kill=none` nsys does not end the process at the end of a window. With
    `wait=primary` it does not wait for child processes that outlive the process, such as the finisher, which waits for
    nsys.
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
    """Return the path of `nsys`, or an empty text if it was not found."""
    return shutil.which(options.executable) or ""


@functools.cache
def writes_at_once(executable: str) -> bool:
    """Return True if an `nsys` can write reports while the process runs: its help names modes of `repeat`."""
    return "[:mode]" in _output(executable, "profile", "--help")


def nsys_folder(options: NsysOptions) -> list[str]:
    """Return the folder to put on the path for Ray's plug-in, or an empty list if `nsys` is the first on the path."""
    path = find_nsys(options)
    return [os.path.dirname(path)] if path and path != shutil.which(EXECUTABLE) else []


def put_on_path(options: NsysOptions) -> None:
    """Put the requested `nsys` first on the path, for the Ray processes that this process is about to start."""
    os.environ["PATH"] = os.pathsep.join([*nsys_folder(options), os.environ.get("PATH", "")])


def nsys_version(executable: str) -> str:
    """Return the version that an `nsys` prints."""
    output = _output(executable, "--version").strip()
    return output.removeprefix("NVIDIA Nsight Systems version ") or "of unknown version"


def _output(executable: str, *arguments: str) -> str:
    """Return the output of an `nsys`, or an empty text if it does not run."""
    try:
        done = subprocess.run([executable, *arguments], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        seam.pass_on(error)
        return ""
    return done.stdout


# Variable of an actor that Ray starts under nsys for autoprof: the `-o` of that nsys. %p stands for the pid.
REPORT = "AUTOPROF_NSYS_REPORT"
# Variables that nsys sets in the processes that it starts. The injected library is set before the session has an id.
_SESSION = "NSYS_PROFILING_SESSION_ID"
_INJECTED = ("CUDA_INJECTION64_PATH", "LD_PRELOAD")
_LIBRARY = "libToolsInjection"


class _NsysState(process.State):
    """Number of windows that this process has opened. nsys numbers their reports in this order, from 1."""

    def begin(self) -> None:
        self.windows = 0


_state = _NsysState()


def here(environ: Mapping[str, str] = os.environ) -> bool:
    """Return True if this process runs under nsys, which then has CUPTI."""
    injected = any(_LIBRARY in environ.get(name, "") for name in _INJECTED)
    return bool(environ.get(_SESSION) or environ.get(REPORT)) or injected


def report() -> str:
    """Return the path of the report without number and ending, if Ray started nsys for autoprof; else an empty text.

    Ray's plug-in puts `-o` into the log folder of the node's session (Ray 2.60, runtime_env/nsight.py).
    """
    pattern, worker = os.environ.get(REPORT, ""), sys.modules.get("ray._private.worker")
    if not pattern or worker is None or worker.global_worker.mode != worker.WORKER_MODE:
        return ""
    return os.path.join(worker._global_node.get_logs_dir_path(), "nsight", pattern.replace("%p", str(os.getpid())))


class NsysTool:
    """Tool that opens and closes the windows that `nsys profile --capture-range=cudaProfilerApi` records.

    nsys writes the report of a window after its end. If autoprof let Ray start nsys, the finisher process waits for the
    report and moves it (`nsys_report.py`). Otherwise the report stays where the user's own nsys command writes it.
    """

    name = "nsys"
    ending = file_names.NSYS_REPORT
    lost: Sequence[str] = ()
    remark = ""

    def __init__(self, asked: bool = True) -> None:
        """Make a tool. `asked`: True if the user wants autoprof to open windows in this session of nsys."""
        self._asked = asked
        # Prefix of the stage's range. It is empty in captures of whole steps, in which the step has a separate range.
        self._prefix = ""
        self._whole_steps = False
        self._number = 0
        self._patience_s = 0.0

    @staticmethod
    def unavailable() -> str:
        """Return the reason why nsys can't record this process, or an empty text."""
        return "" if here() else "this process does not run under nsys"

    def start(self, settings: Settings, raw: Path) -> list[str]:
        """Open a window.

        Raises:
            RuntimeError: CUDA is not initialised in this process. `cudaProfilerStart` would initialise it on the
                default device, before the program has chosen one (torch 2.13, torch/cuda/__init__.py, cudart).
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
        except (ImportError, AttributeError, RuntimeError) as error:  # a torch without NVTX
            seam.pass_on(error)
            log.warning_once(
                f"the range that names the capture could not be marked for nsys: {type(error).__name__}: {error}"
            )

    def mark(self, name: str) -> Callable[[], None]:
        """Begin an NVTX range. Return the function that ends it, in any thread."""
        try:
            from torch.cuda import nvtx

            begun = nvtx.range_start(f"{self._prefix}{name}")
        except (ImportError, AttributeError, RuntimeError) as error:
            seam.pass_on(error)
            log.warning_once(f"ranges can't be marked for nsys: {type(error).__name__}: {error}")
            return nothing
        self._prefix = ""
        return lambda: nvtx.range_end(begun)

    def stop(self) -> None:
        """Close the window after the device has finished its work, as torch.profiler does."""
        import torch.cuda.profiler

        try:
            torch.cuda.synchronize()
        finally:
            torch.cuda.profiler.stop()

    def abort(self) -> None:
        if self._number:
            self.stop()

    def export(self, path: str) -> None:
        """Write the description of this window's report, for the finisher, to `path`."""
        known = {"report": report(), "number": self._number, "pid": os.getpid(), "patience_s": self._patience_s}
        with io.open(path, "w", encoding="utf-8", opener=files.descriptor) as file:
            json.dump(known, file)

    def busy(self) -> str:
        """Return the reason why this process can't record, or an empty text.

        A child of an actor under nsys gets no report: nsys records it with the actor, if at all.
        """
        if not self._asked:
            return "this process runs under nsys, which has CUPTI; AUTOPROF_TOOL=nsys opens windows for it"
        if os.environ.get(REPORT) and not report():
            return "nsys records the process that started this one, and its children with it"
        return ""
