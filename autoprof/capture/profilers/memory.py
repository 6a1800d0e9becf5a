"""The history of CUDA's caching allocator: allocations and frees with their stacks, a snapshot a window."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from autoprof.base import files, interrupts
from autoprof.base.originals import io
from autoprof.capture.profilers import memory_history
from autoprof.config.settings import Settings
from autoprof.rundir import file_names


class MemoryTool:
    """Records with `torch.cuda.memory` and writes a snapshot that torch's memory viewer opens."""

    name = "memory"
    ending = file_names.SNAPSHOT
    lost: Sequence[str] = ()
    remark = ""

    def __init__(self) -> None:
        self._subject: dict[str, Any] = {}
        self._snapshot: dict[str, Any] = {}
        self._problem = ""
        self._changes = 0

    @staticmethod
    def unavailable() -> str:
        """Return why this process can't record the allocator's history, or an empty text.

        Asking for it would make the process take a GPU (`_cuda_record_memory_history` initialises CUDA), which one
        that only drives others must not.
        """
        cuda = getattr(sys.modules.get("torch"), "cuda", None)
        try:
            return "" if cuda is not None and cuda.is_initialized() else "this process uses no CUDA"
        except Exception as error:
            interrupts.pass_on(error)
            return f"torch.cuda: {type(error).__name__}: {error}"

    def start(self, settings: Settings, raw: Path) -> list[str]:
        if why := self.busy():
            raise RuntimeError(why)
        self._changes = memory_history.changes()
        memory_history.begin(settings.memory)
        return ["memory"]

    def stamp(self, subject: dict[str, Any]) -> None:
        self._subject = {name: value for name, value in subject.items() if isinstance(value, (str, int))}

    def mark(self, name: str) -> Callable[[], None]:
        return _nothing

    def stop(self) -> None:
        """Take the snapshot and switch the history off, which empties it. Raises nothing: a profiler stops as well."""
        try:
            if memory_history.changes() != self._changes:
                self._problem = "other code in this process switched the memory history during the capture"
            else:
                self._snapshot = memory_history.snapshot()
        except Exception as error:
            interrupts.pass_on(error)
            self._problem = f"{type(error).__name__}: {error}"
        try:
            memory_history.end()
        except Exception as error:
            interrupts.pass_on(error)
            self._problem = self._problem or f"{type(error).__name__}: {error}"

    def abort(self) -> None:
        with interrupts.suppress(Exception):
            memory_history.end()

    def export(self, path: str) -> None:
        snapshot, self._snapshot = self._snapshot, {}
        if self._problem:
            raise OSError(self._problem)
        write(snapshot, self._subject, path)

    def busy(self) -> str:
        return memory_history.foreign()


def write(snapshot: dict[str, Any], subject: dict[str, Any], path: str) -> None:
    """Write a snapshot as `torch.cuda.memory._dump_snapshot` does, and in it, under `autoprof`, what it is of.

    Viewers look into it by key.

    Raises:
        OSError: It can't be written.
    """
    with io.open(path, "wb", opener=files.descriptor) as file:
        pickle.dump(snapshot | {"autoprof": subject}, file)


def _nothing() -> None:
    """Do nothing: the history has no ranges."""
