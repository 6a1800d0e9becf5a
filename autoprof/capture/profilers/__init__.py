"""Profilers, each a class with the methods of `Tool`, and the choice of one for this process."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from autoprof.base import log, seam
from autoprof.config.settings import Settings

# Default of `AUTOPROF_TOOL`.
AUTOMATIC = ("npu", "torch")
NO_TORCH = "no torch in this process"
IMPORTED_LATE = "the process had not imported torch when this capture began"


class Tool(Protocol):
    """Recorder in this process.

    Attributes:
        name: Its word in `AUTOPROF_TOOL`.
        ending: Ending of the name of its file or folder; empty if it writes nothing.
        lost: Names of parts that it did not record. Known once it has stopped.
    """

    name: str
    ending: str
    lost: Sequence[str]

    @property
    def remark(self) -> str:
        """Reason for the meta file why it records less than requested, or an empty text. Known once it has stopped."""

    def start(self, settings: Settings, raw: Path) -> list[str]:
        """Start recording. Return the recorded contents.

        Args:
            settings: Settings with the contents; the tool has a default for empty contents.
            raw: Path for the output. A tool that writes while it records makes a folder there.

        Raises:
            Exception: The tool does not record.
        """

    def stamp(self, subject: dict[str, Any]) -> None:
        """Write the subject into the recording. Never raises."""

    def mark(self, name: str) -> Callable[[], None]:
        """Begin a range in the recording. Return the function that ends it, to be called in the same thread."""

    def stop(self) -> None:
        """Stop recording."""

    def abort(self) -> None:
        """Stop recording, if it is on, and lose it, after `start` or `stop` was interrupted. May be called again."""

    def export(self, path: str) -> None:
        """Write the recording to `path`, the `raw` of `start`.

        Raises:
            Exception: The recording can't be written.
        """

    def busy(self) -> str:
        """Return the reason why this process can't record now, or an empty text."""


class NothingTool:
    """Stand-in in a process that has not imported torch. It writes no file, so its captures have only a meta file.

    Every profiler needs torch. Importing it would take seconds and hundreds of megabytes in a process that does not use
    it.
    """

    name = "none"
    ending = ""
    lost: Sequence[str] = ()

    @property
    def remark(self) -> str:
        return IMPORTED_LATE if _has_torch() else NO_TORCH

    def start(self, settings: Settings, raw: Path) -> list[str]:
        return []

    def stamp(self, subject: dict[str, Any]) -> None:
        """Do nothing."""

    def mark(self, name: str) -> Callable[[], None]:
        return nothing

    def stop(self) -> None:
        """Do nothing."""

    def abort(self) -> None:
        """Do nothing."""

    def export(self, path: str) -> None:
        """Do nothing."""

    def busy(self) -> str:
        return ""


def _has_torch() -> bool:
    """Return True if this process has imported torch or is importing it."""
    return sys.modules.get("torch") is not None


def nothing() -> None:
    """Do nothing: no range has begun."""


def choose(settings: Settings) -> Tool:
    """Return this process's profiler: the first of `AUTOPROF_TOOL` that can record here, else torch's.

    In a process without torch, no profiler can record (`NothingTool`).

    The tool is chosen in each process. For example, a run has workers that use NPUs, and a trainer that uses none. The
    memory history records beside a profiler (`beside`), unless it is the only requested tool. In a process under nsys,
    other profilers are not used: CUPTI serves only one, so they would record nothing of the device or take it from
    nsys. Without `nsys` in `AUTOPROF_TOOL`, autoprof opens no window there, because the user may count the windows.
    """
    from autoprof.capture.profilers.memory import MemoryTool
    from autoprof.capture.profilers.npu import NpuTool
    from autoprof.capture.profilers.nsys import NsysTool
    from autoprof.capture.profilers.torch import TorchTool

    if not _has_torch():
        return NothingTool()
    kinds: dict[str, type[Any]] = {"torch": TorchTool, "npu": NpuTool, "nsys": NsysTool, "memory": MemoryTool}
    requested = [name for name in settings.tool if name != "memory"] or settings.tool or AUTOMATIC
    if not NsysTool.unavailable() and "memory" not in requested:
        return NsysTool("nsys" in requested)
    for name in requested:
        if not (reason := kinds[name].unavailable()):
            tool: Tool = kinds[name]()
            return tool
    log.warning_once(f"AUTOPROF_TOOL={','.join(settings.tool)}: {reason}; torch.profiler records instead")
    return TorchTool()


def beside(settings: Settings, profiler: Tool) -> list[Tool]:
    """Return the tools that record beside a profiler in this process."""
    from autoprof.capture.profilers.memory import MemoryTool

    wanted = "memory" in settings.tool and not isinstance(profiler, MemoryTool) and not MemoryTool.unavailable()
    return [MemoryTool()] if wanted else []


def outlook(asked: tuple[str, ...], imports: bool = True) -> str:
    """Return a description of the tool that processes of this environment would use, and the reason.

    Args:
        asked: The value of `AUTOPROF_TOOL`.
        imports: True to import torch_npu if it is installed, to see if that fails.
    """
    if "nsys" in asked:
        others = ",".join(name for name in asked if name not in ("nsys", "memory")) or "torch"
        return f"nsys in processes that run under it, {others} in others (AUTOPROF_TOOL)"
    if "npu" not in (asked or AUTOMATIC):
        return f"{','.join(asked)} (AUTOPROF_TOOL)"
    source = "AUTOPROF_TOOL" if asked else "no AUTOPROF_TOOL"
    spec = find_spec("torch_npu")
    if spec is None or spec.origin is None:  # without an origin it is only a folder of that name
        return f"torch ({source}; torch_npu is not installed)"
    try:
        if imports:
            importlib.import_module("torch_npu.profiler")
    except Exception as error:
        seam.pass_on(error)
        return f"torch ({source}; importing torch_npu raised {type(error).__name__}: {error})"
    return f"npu in processes that use an NPU, torch in others ({source})"


def versions() -> dict[str, str]:
    """Return the versions of torch and torch_npu in this process. torch's is empty if torch is not imported."""
    imported = {name: str(getattr(sys.modules.get(name), "__version__", "")) for name in ("torch", "torch_npu")}
    return {name: version for name, version in imported.items() if version or name == "torch"}


def accepted(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `arguments` that a function of the installed release has parameters for."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in parameters}
