"""The interface of a profiler (`Tool`), and the choice of the profiler for this process.

Each module of this package has one profiler: a subclass of `Tool`.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from autoprof.base import log, seam
from autoprof.config.settings import Settings

# If `AUTOPROF_TOOL` is not set: the profilers to try, in this order.
AUTOMATIC = ("npu", "torch")
NO_TORCH = "no torch in this process"
IMPORTED_LATE = "the process had not imported torch when this capture began"


class Tool:
    """A profiler that records in this process. The methods of this base class do nothing.

    Attributes:
        name: The word for the tool in `AUTOPROF_TOOL`.
        ending: Ending of the name of the file or folder that the tool writes; empty if the tool writes nothing.
        lacking: Requested options that the installed profiler does not support. Known once the tool has started.
        lost: Names of the parts that the tool did not record. Known once the tool has stopped.
        remark: If the tool recorded less than requested: the reason, for the meta file. Otherwise an empty text. Known
            once the tool has stopped.
    """

    name = ""
    ending = ""
    lacking: Sequence[str] = ()
    lost: Sequence[str] = ()
    remark = ""

    @staticmethod
    def unavailable() -> str:
        """If this process can't record with this tool, return the reason. Otherwise return an empty text."""
        return ""

    def busy(self) -> str:
        """If this process can't record now, return the reason. Otherwise return an empty text."""
        return ""

    def start(self, settings: Settings, raw: Path) -> list[str]:
        """Start recording. Return the contents that the tool records.

        Args:
            settings: Settings of the capture. If they request no contents, the tool records its default contents.
            raw: Path for the output. If the tool writes while it records, it makes a folder at this path.

        Raises:
            Exception: The tool could not start.
        """
        return []

    def stamp(self, subject: dict[str, Any]) -> None:
        """Write the subject into the recording. Never raises."""

    def mark(self, name: str) -> Callable[[], None]:
        """Begin a range in the recording. Return the function that ends the range.

        The same thread must call that function.
        """
        return nothing

    def stop(self) -> None:
        """Stop recording."""

    def abort(self) -> None:
        """End the recording, if it is on, and discard it. Called after `start` or `stop` was interrupted.

        May be called more than once.
        """

    def export(self, path: str) -> None:
        """Write the recording to `path`, which is the path `raw` that `start` got.

        Raises:
            Exception: The recording can't be written.
        """


class NothingTool(Tool):
    """Replacement for a profiler in a process that has not imported torch. It records nothing and writes no file.

    So a capture with this tool has only a meta file. Every profiler needs torch. autoprof does not import torch in a
    process that does not use it, because the import would take seconds and hundreds of megabytes.
    """

    name = "none"
    remark = NO_TORCH

    def stop(self) -> None:
        if sys.modules.get("torch") is not None:
            self.remark = IMPORTED_LATE


def nothing() -> None:
    """Do nothing. Returned by `mark` in place of the function that ends a range, if no range has begun."""


def choose(settings: Settings) -> Tool:
    """Return the profiler for this process: the first tool of `AUTOPROF_TOOL` that can record in this process.

    If none of them can record, return torch's profiler. In a process without torch, no profiler can record
    (`NothingTool`).

    Each process chooses its tool. For example, the workers of a run use NPUs, and the trainer uses none.

    If the memory history is requested together with a profiler, it records beside the profiler (`beside`). If it is the
    only requested tool, this function returns it.

    A process under nsys uses no other profiler, because CUPTI serves only one profiler. Another one would record no
    events of the device, or it would take CUPTI from nsys. If `AUTOPROF_TOOL` does not contain `nsys`, autoprof opens
    no window of nsys, because the user may count the windows.
    """
    from autoprof.capture.profilers.memory import MemoryTool
    from autoprof.capture.profilers.npu import NpuTool
    from autoprof.capture.profilers.nsys import NsysTool, runs_under_nsys
    from autoprof.capture.profilers.torch import TorchTool

    if sys.modules.get("torch") is None:
        return NothingTool()
    kinds: dict[str, type[Tool]] = {"torch": TorchTool, "npu": NpuTool, "nsys": NsysTool, "memory": MemoryTool}
    requested_names = [name for name in settings.tool if name != "memory"] or settings.tool or AUTOMATIC
    if runs_under_nsys() and "memory" not in requested_names:
        return NsysTool("nsys" in requested_names)
    for name in requested_names:
        if not (reason := kinds[name].unavailable()):
            return kinds[name]()
    log.warning_once(f"AUTOPROF_TOOL={','.join(settings.tool)}: {reason}; torch.profiler records instead")
    return TorchTool()


def beside(settings: Settings, profiler: Tool) -> list[Tool]:
    """Return the tools that record at the same time as a profiler in this process: the memory history, if requested."""
    from autoprof.capture.profilers.memory import MemoryTool

    adds_memory = "memory" in settings.tool and not isinstance(profiler, MemoryTool) and not MemoryTool.unavailable()
    return [MemoryTool()] if adds_memory else []


def outlook(asked: tuple[str, ...], may_import: bool = True) -> str:
    """Return a text that says which tool the processes of this environment would use, and why.

    Args:
        asked: The value of `AUTOPROF_TOOL`.
        may_import: True to import torch_npu, if it is installed. If the import fails, the text contains the error.
    """
    if "nsys" in asked:
        other_tools = ",".join(name for name in asked if name not in ("nsys", "memory")) or "torch"
        return f"nsys in processes that run under it, {other_tools} in others (AUTOPROF_TOOL)"
    if "npu" not in (asked or AUTOMATIC):
        return f"{','.join(asked)} (AUTOPROF_TOOL)"
    source = "AUTOPROF_TOOL" if asked else "no AUTOPROF_TOOL"
    spec = find_spec("torch_npu")
    if spec is None or spec.origin is None:  # without an origin, it is only a folder called torch_npu
        return f"torch ({source}; torch_npu is not installed)"
    _, error = seam.attempt(importlib.import_module, "torch_npu.profiler") if may_import else (None, None)
    if error is not None:
        return f"torch ({source}; importing torch_npu raised {type(error).__name__}: {error})"
    return f"npu in processes that use an NPU, torch in others ({source})"


def versions() -> dict[str, str]:
    """Return the versions of torch and torch_npu in this process, as a dict from package to version.

    If torch is not imported, its version is an empty text. If torch_npu is not imported, the dict does not contain it.
    """
    version_of = {name: str(getattr(sys.modules.get(name), "__version__", "")) for name in ("torch", "torch_npu")}
    return {name: version for name, version in version_of.items() if version or name == "torch"}


def accepted(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments for which a function has parameters. Other releases of a library may have other parameters.

    Args:
        function: The function of the installed release.
        arguments: Dict from the name of a parameter to the argument.
    """
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in parameters}
