"""Nsight Systems as a tool: the options of `nsys profile`, and windows and ranges in a process that runs under nsys."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from autoprof.base import files, log, process, seam
from autoprof.base.originals import io, json, os, shutil, subprocess
from autoprof.capture.profilers import Tool, nothing
from autoprof.config.settings import Settings
from autoprof.config.values import NsysOptions
from autoprof.rundir import file_names

# Value of nsys's option `-o` when Ray's plug-in starts nsys. nsys replaces %p by the pid of the recorded process.
OUTPUT = "autoprof_%p"
# The only name of the executable that Ray's plug-in accepts (Ray 2.60, runtime_env/nsight.py, parse_nsight_config).
EXECUTABLE = "nsys"
_TIMEOUT_S = 30
AT_THE_END = (
    "this nsys writes its reports only when the recorded process ends, and Ray may kill that process first; "
    "install an nsys whose `nsys profile --help` lists repeat[:N][:mode]"
)


def profile_options(options: NsysOptions) -> dict[str, str]:
    """Return the options of `nsys profile`, as a dict from the long name of an option to its value.

    * `capture-range-end=repeat` has no number. With a number, nsys would stop recording after this number of windows,
      but `autoprof trigger` may add windows.
    * `async`: nsys writes the report of each window after the window. By default, nsys writes all reports when the
      recorded process ends, and Ray may kill that process first (ray#66129).
    * `kill=none`: nsys does not end the recorded process at the end of a window.
    * `wait=primary`: nsys does not wait for child processes that outlive the recorded process. The finisher is such a
      child, and it waits for nsys.
    """
    arguments = {
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
        arguments["python-backtrace"] = "cuda"
    if options.gpu_metrics != "none":
        arguments["gpu-metrics-devices"] = options.gpu_metrics.replace("+", ",")
    return arguments


def find_nsys(options: NsysOptions) -> str:
    """Return the path of the `nsys` that the options request. If it is not found, return an empty text."""
    return shutil.which(options.executable) or ""


@functools.cache
def writes_at_once(executable: str) -> bool:
    """Return True if this `nsys` can write reports while the recorded process runs.

    Such an `nsys` lists modes of `repeat` in its help.
    """
    return "[:mode]" in _output(executable, "profile", "--help")


def nsys_folder(options: NsysOptions) -> list[str]:
    """Return a list with the folder to put on `PATH`, so that Ray's plug-in finds the requested `nsys`.

    The list is empty if `PATH` already leads to the requested `nsys`, or if it was not found.
    """
    path = find_nsys(options)
    return [os.path.dirname(path)] if path and path != shutil.which(EXECUTABLE) else []


def put_on_path(options: NsysOptions) -> None:
    """Put the folder of the requested `nsys` first on `PATH`, for the Ray processes that this process will start."""
    os.environ["PATH"] = os.pathsep.join([*nsys_folder(options), os.environ.get("PATH", "")])


def nsys_version(executable: str) -> str:
    """Return the version that this `nsys` prints. If it prints none, return `of unknown version`."""
    output = _output(executable, "--version").strip()
    return output.removeprefix("NVIDIA Nsight Systems version ") or "of unknown version"


def _output(executable: str, *arguments: str) -> str:
    """Run this `nsys` and return its output. If the command fails, return an empty text."""
    try:
        done = subprocess.run([executable, *arguments], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        seam.pass_on(error)
        return ""
    return done.stdout


# autoprof sets this variable in an actor that Ray starts under nsys for autoprof. Its value is the option `-o` of nsys,
# in which %p stands for the pid.
REPORT = "AUTOPROF_NSYS_REPORT"
# Variables that nsys sets in the processes that it starts. nsys sets the injected library before the session has an id.
_SESSION = "NSYS_PROFILING_SESSION_ID"
_INJECTED = ("CUDA_INJECTION64_PATH", "LD_PRELOAD")
_LIBRARY = "libToolsInjection"


class _NsysState(process.State):
    """Number of windows that this process has opened. nsys numbers the reports in the order of the windows, from 1."""

    def reset(self) -> None:
        self.windows = 0


_state = _NsysState()


def runs_under_nsys(environ: Mapping[str, str] = os.environ) -> bool:
    """Return True if this process runs under nsys. In such a process, nsys uses CUPTI."""
    has_library = any(_LIBRARY in environ.get(name, "") for name in _INJECTED)
    return bool(environ.get(_SESSION) or environ.get(REPORT)) or has_library


def report() -> str:
    """Return the path of this process's reports, without the number and the ending.

    If Ray did not start this process under nsys for autoprof, return an empty text. Ray's plug-in puts the reports into
    the log folder of the node's session (Ray 2.60, runtime_env/nsight.py).
    """
    pattern, worker = os.environ.get(REPORT, ""), sys.modules.get("ray._private.worker")
    if not pattern or worker is None or worker.global_worker.mode != worker.WORKER_MODE:
        return ""
    return os.path.join(worker._global_node.get_logs_dir_path(), "nsight", pattern.replace("%p", str(os.getpid())))


class NsysTool(Tool):
    """Tool that opens and closes the windows that `nsys profile --capture-range=cudaProfilerApi` records.

    nsys writes the report of a window after the end of the window. If Ray started nsys for autoprof, the finisher
    process waits for the report and moves it (`finisher.take_report`). Otherwise the report stays where the user's own
    nsys command writes it.
    """

    name = "nsys"
    ending = file_names.NSYS_REPORT

    def __init__(self, asked: bool = True) -> None:
        """Make a tool that has no open window.

        Args:
            asked: True if `AUTOPROF_TOOL` contains `nsys`, so that autoprof may open windows in this session of nsys.
        """
        self._asked = asked
        # Text before the name of the stage's range. Empty in a capture of a whole step, where the step has its own
        # range.
        self._prefix = ""
        self._whole_steps = False
        self._number = 0
        self._patience_s = 0.0

    @staticmethod
    def unavailable() -> str:
        """If nsys can't record this process, return the reason. Otherwise return an empty text."""
        return "" if runs_under_nsys() else "this process does not run under nsys"

    def start(self, settings: Settings, raw: Path) -> list[str]:
        """Open a window. Return the contents that nsys records.

        Raises:
            RuntimeError: CUDA is not initialised in this process. `cudaProfilerStart` would initialise CUDA on the
                default device, before the program has chosen a device (torch 2.13, torch/cuda/__init__.py, cudart).
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
        """Begin an NVTX range. Return the function that ends the range. Any thread may call that function."""
        try:
            from torch.cuda import nvtx

            range_id = nvtx.range_start(f"{self._prefix}{name}")
        except (ImportError, AttributeError, RuntimeError) as error:
            seam.pass_on(error)
            log.warning_once(f"ranges can't be marked for nsys: {type(error).__name__}: {error}")
            return nothing
        self._prefix = ""
        return lambda: nvtx.range_end(range_id)

    def stop(self) -> None:
        """Wait until the device has finished its work, as torch.profiler does, then end nsys's capture range."""
        import torch.cuda.profiler

        try:
            torch.cuda.synchronize()
        finally:
            torch.cuda.profiler.stop()

    def abort(self) -> None:
        if self._number:
            self.stop()

    def export(self, path: str) -> None:
        """Write to `path` a description of the report of nsys's capture range.

        With the description, the finisher process finds the report.
        """
        description = {"report": report(), "number": self._number, "pid": os.getpid(), "patience_s": self._patience_s}
        with io.open(path, "w", encoding="utf-8", opener=files.descriptor) as file:
            json.dump(description, file)

    def busy(self) -> str:
        """If this process can't begin nsys's capture range, return the reason. Otherwise return an empty text.

        A child process of an actor under nsys gets no report for itself. If nsys records the child at all, it records
        the child together with the actor.
        """
        if not self._asked:
            return "this process runs under nsys, which has CUPTI; AUTOPROF_TOOL=nsys opens windows for it"
        if os.environ.get(REPORT) and not report():
            return "nsys records the process that started this one, and its children with it"
        return ""
