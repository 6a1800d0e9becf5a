"""Command line of `nsys`: its options, its path and its version."""

from __future__ import annotations

import functools

from autoprof.base import interrupts
from autoprof.base.originals import os, shutil, subprocess
from autoprof.config.tool_options import NsysOptions

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
        "capture-range-end": "repeat:async" if writes_at_once(find(options)) else "repeat",
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


def find(options: NsysOptions) -> str:
    """Return the path of `nsys`, or an empty text where there is none."""
    return shutil.which(options.executable) or ""


@functools.cache
def writes_at_once(executable: str) -> bool:
    """Return whether an `nsys` can write reports while the process goes on: its help names modes of `repeat`."""
    return "[:mode]" in _said(executable, "profile", "--help")


def folder(options: NsysOptions) -> list[str]:
    """Return the folder of an `nsys` that is not the first on the path, as Ray's plug-in needs it."""
    found = find(options)
    return [os.path.dirname(found)] if found and found != shutil.which(EXECUTABLE) else []


def put_on_path(options: NsysOptions) -> None:
    """Have Ray's processes, which this one is about to start, find the `nsys` that was asked for."""
    os.environ["PATH"] = os.pathsep.join([*folder(options), os.environ.get("PATH", "")])


def version(executable: str) -> str:
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
