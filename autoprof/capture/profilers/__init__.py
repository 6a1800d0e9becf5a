"""Profilers, one class each with the methods of `Tool`, and the choice of this process among them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from autoprof.base import interrupts, log
from autoprof.config.settings import Settings

# Without `AUTOPROF_TOOL`.
AUTOMATIC = ("npu", "torch")


class Tool(Protocol):
    """A recorder in this process.

    Attributes:
        name: Its word in `AUTOPROF_TOOL`.
        ending: How the name of what it writes ends; empty if it writes nothing.
        lost: What it did not record, known when it has stopped.
    """

    name: str
    ending: str
    lost: Sequence[str]

    @property
    def remark(self) -> str:
        """Return why it records less than was asked, for the meta file; known when it has stopped."""

    def start(self, settings: Settings, raw: Path) -> list[str]:
        """Begin to record the contents of `settings`, or what is usual where they are empty; returns what is recorded.

        A tool that writes while it records makes `raw` a folder and writes there.

        Raises:
            Exception: It does not record.
        """

    def stamp(self, subject: dict[str, Any]) -> None:
        """Write the subject into the recording. Raises nothing."""

    def mark(self, name: str) -> Callable[[], None]:
        """Begin a range of this name in what is being recorded; what is returned ends it, in the same thread."""

    def stop(self) -> None:
        """End recording."""

    def abort(self) -> None:
        """End recording, if it goes on, and lose it: `start` or `stop` was interrupted. May be called again."""

    def export(self, path: str) -> None:
        """See to it that all that was recorded is at `path`, the `raw` of the start.

        Raises:
            Exception: It is not.
        """

    def busy(self) -> str:
        """Return why this process can't record now, or an empty text."""


def choose(settings: Settings) -> Tool:
    """Return this process's profiler: the first that `AUTOPROF_TOOL` asks for and that can record here, else torch's.

    In a process without torch none can record (`NothingTool`).

    The tool is chosen in each process: one run has processes that use NPUs, and a trainer that uses none. The memory
    history goes beside a profiler (`beside`), unless nothing else is asked for. In a process that runs under nsys no
    other profiler gets anything of the device, or takes it from nsys: CUPTI serves one. And whoever did not ask for
    nsys here may count the windows of its session.
    """
    from autoprof.capture.profilers.memory import MemoryTool
    from autoprof.capture.profilers.nothing import NothingTool, has_torch
    from autoprof.capture.profilers.npu import NpuTool
    from autoprof.capture.profilers.nsys import NsysTool
    from autoprof.capture.profilers.torch import TorchTool

    if not has_torch():
        return NothingTool()
    kinds: dict[str, type[Any]] = {"torch": TorchTool, "npu": NpuTool, "nsys": NsysTool, "memory": MemoryTool}
    asked = [name for name in settings.tool if name != "memory"] or settings.tool or AUTOMATIC
    if not NsysTool.unavailable() and "memory" not in asked:
        return NsysTool("nsys" in asked)
    for name in asked:
        if not (why := kinds[name].unavailable()):
            tool: Tool = kinds[name]()
            return tool
    log.warning_once(f"AUTOPROF_TOOL={','.join(settings.tool)}: {why}; torch.profiler records instead")
    return TorchTool()


def beside(settings: Settings, profiler: Tool) -> list[Tool]:
    """Return the tools that record beside a profiler in this process."""
    from autoprof.capture.profilers.memory import MemoryTool

    wanted = "memory" in settings.tool and not isinstance(profiler, MemoryTool) and not MemoryTool.unavailable()
    return [MemoryTool()] if wanted else []


def outlook(asked: tuple[str, ...], imports: bool = True) -> str:
    """Return the tool that processes of this environment would take, and why.

    Args:
        asked: `AUTOPROF_TOOL`.
        imports: Whether torch_npu is imported if it is there, to see whether it can be.
    """
    if "nsys" in asked:
        others = ",".join(name for name in asked if name not in ("nsys", "memory")) or "torch"
        return f"nsys in processes that run under it, {others} in others (AUTOPROF_TOOL)"
    if "npu" not in (asked or AUTOMATIC):
        return f"{','.join(asked)} (AUTOPROF_TOOL)"
    said = "AUTOPROF_TOOL" if asked else "no AUTOPROF_TOOL"
    found = find_spec("torch_npu")
    if found is None or found.origin is None:  # a mere folder of that name
        return f"torch ({said}; torch_npu is not installed)"
    try:
        if imports:
            importlib.import_module("torch_npu.profiler")
    except Exception as error:
        interrupts.pass_on(error)
        return f"torch ({said}; importing torch_npu raised {type(error).__name__}: {error})"
    return f"npu in processes that use an NPU, torch in others ({said})"


def versions() -> dict[str, str]:
    """Return the versions of the packages that can record in this process, as far as they are imported."""
    found = {name: str(getattr(sys.modules.get(name), "__version__", "")) for name in ("torch", "torch_npu")}
    return {name: version for name, version in found.items() if version or name == "torch"}
