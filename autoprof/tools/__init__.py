"""What records: one class a tool, each with the methods of `Tool`, and which of them this process takes."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from autoprof import log

# Where nothing is asked for.
AUTOMATIC = ("npu", "torch")


class Tool(Protocol):
    """A recorder in this process.

    Attributes:
        name: Its word in `AUTOPROF_TOOL`.
        ending: How the name of what it writes ends.
    """

    name: str
    ending: str

    def start(self, contents: tuple[str, ...], raw: Path) -> list[str]:
        """Begin to record `contents`, or what is usual where they are empty, and return what is recorded.

        A tool that writes while it records makes `raw` a folder and writes there.

        Raises:
            Exception: It does not record.
        """

    def stop(self) -> None:
        """End recording."""

    def export(self, path: str) -> None:
        """See to it that all that was recorded is at `path`, the `raw` of the start.

        Raises:
            Exception: It is not.
        """

    def busy(self) -> str:
        """Why this process can't record now, or an empty text."""


def choose(asked: tuple[str, ...]) -> Tool:
    """The first tool of `asked` (`AUTOPROF_TOOL`) that can record in this process, else torch's.

    The tool is chosen in each process: one run has processes that use NPUs, and a trainer that uses none.
    """
    from autoprof.tools.npu import NpuTool, unavailable
    from autoprof.tools.torch import TorchTool

    for name in asked or AUTOMATIC:
        why = unavailable() if name == "npu" else ""
        if not why:
            return NpuTool() if name == "npu" else TorchTool()
    log.warning_once(f"AUTOPROF_TOOL={','.join(asked)}: {why}; torch.profiler records instead")
    return TorchTool()


def outlook(asked: tuple[str, ...]) -> str:
    """Which tool processes of this environment would take, and why. Imports torch_npu if it is there."""
    if "npu" not in (asked or AUTOMATIC):
        return "torch (AUTOPROF_TOOL)"
    said = "AUTOPROF_TOOL" if asked else "no AUTOPROF_TOOL"
    found = find_spec("torch_npu")
    if found is None or found.origin is None:  # a mere folder of that name
        return f"torch ({said}; torch_npu is not installed)"
    try:
        importlib.import_module("torch_npu.profiler")
    except Exception as error:
        return f"torch ({said}; importing torch_npu raised {type(error).__name__}: {error})"
    return f"npu in processes that use an NPU, torch in others ({said})"


def versions() -> dict[str, str]:
    """The versions of what can record in this process, as far as it is imported."""
    found = {name: str(getattr(sys.modules.get(name), "__version__", "")) for name in ("torch", "torch_npu")}
    return {name: version for name, version in found.items() if version or name == "torch"}
