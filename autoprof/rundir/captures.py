"""Captures as they lie in a step's folder."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from autoprof.base import files
from autoprof.base.originals import os
from autoprof.rundir import decoder, file_names
from autoprof.rundir.file_names import META, NPU_FOLDER, NSYS_REPORT, PART, RAW_ENDINGS, SNAPSHOT, TRACE, is_merged
from autoprof.rundir.records import CaptureMeta, MergedMeta

# Of a capture or a run whose process is gone without a word.
UNFINISHED = "unfinished"
_WHOLE = (TRACE, SNAPSHOT, NSYS_REPORT)
_HALVES = tuple(f"{ending}{PART}" for ending in (TRACE, *RAW_ENDINGS, META))


class CaptureFile:
    """One capture in a step's folder. What is told of it is read when it is first asked for: a run has thousands.

    Attributes:
        name: The names of its files, without their endings.
        left_out: What could not be read of its files.
    """

    def __init__(self, folder: str, name: str, trace: str = "") -> None:
        self.name = name
        self.left_out: list[str] = []
        self._folder = folder
        self._trace = trace

    @cached_property
    def bytes(self) -> int:
        """Return the size of its trace, 0 where there is none."""
        try:
            return files.size(f"{self._folder}/{self._trace}") if self._trace else 0
        except OSError as error:  # it has a new name by now, or none
            self.left_out.append(f"{self._trace}: it can't be read: {error.strerror}")
            return 0

    @cached_property
    def fields(self) -> dict[str, Any]:
        """Return the fields of the meta file, none where there is no such file."""
        kind = MergedMeta if is_merged(self.name) else CaptureMeta
        return decoder.fields(f"{self._folder}/{self.name}{META}", kind, self.left_out)

    @property
    def state(self) -> str:
        """Return the state in the meta file, or `unfinished`."""
        return str(self.fields.get("state", UNFINISHED))

    @cached_property
    def meta(self) -> CaptureMeta:
        """Return the meta file."""
        return decoder.record(self.fields, CaptureMeta)

    @property
    def untraced(self) -> bool:
        """Return True if nothing was to be recorded, so that there is no trace; `meta.reason` says why."""
        return self.state == "complete" and self.meta.tool == "none"

    @cached_property
    def merged(self) -> MergedMeta:
        """Return the meta file of a merged trace."""
        return decoder.record(self.fields, MergedMeta)

    def described(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {"name": self.name, "bytes": self.bytes, "state": self.state, "meta": self.fields}


class Step:
    """One step's folder.

    Attributes:
        captures: Its captures, by name.
        merged: Files that hold what captures hold already.
        left_out: Why the folder could not be read, if so.
    """

    def __init__(self, number: int, folder: str) -> None:
        self.number = number
        self.left_out: list[str] = []
        try:
            found = _captures(folder)
        except FileNotFoundError:  # the timeline alone may tell of a step
            found = []
        except OSError as error:
            self.left_out.append(f"{os.path.basename(folder)}: it can't be read: {error.strerror}")
            found = []
        self.captures: list[CaptureFile] = []
        self.merged: list[CaptureFile] = []
        for capture in found:
            (self.merged if is_merged(capture.name) else self.captures).append(capture)


def _captures(folder: str) -> list[CaptureFile]:
    names: dict[str, str] = {}
    for entry in sorted(os.listdir(folder)):
        if entry.endswith(NPU_FOLDER) and (npu := file_names.FOLDER.search(entry)):
            names[entry.removesuffix(npu.group())] = entry
            continue
        for ending in _HALVES if entry.endswith(PART) else (META, *_WHOLE):
            if entry.endswith(ending):
                name = entry.removesuffix(ending)
                names[name] = entry if ending in _WHOLE else names.get(name, "")
                break
    return [CaptureFile(folder, name, trace) for name, trace in sorted(names.items())]
