"""Reader of the memory of this process, of the memory limit that the process will reach first, and of kernel kills.

A kernel kill is a process that the kernel killed because memory ran out. The values come from about ten small files of
the kernel, which no other module reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from autoprof.base import files
from autoprof.base.originals import time
from autoprof.rundir.records import MemoryLine, MemoryState

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
# A limit of at least this number of bytes means "no limit": cgroup version 1 shows a number near 2 ** 63 in that case.
_NO_LIMIT = 1 << 60
# A new memory line is written if the process has grown by 1/8 and by at least 64 MiB.
_GROWTH_DIVISOR, _MIN_GROWTH_BYTES = 8, 64 << 20


class MemoryWatch:
    """The memory of this process at the last measurement and at its last memory line."""

    def __init__(self) -> None:
        self._current: MemoryState | None = None
        self._written = MemoryState()

    def recent(self) -> MemoryState:
        """Return the memory at the last measurement, which `look` compares with. Measure it first if needed."""
        if self._current is None:
            self._current = state()
        self._written = self._current
        return self._current

    def look(self, even_if_same: bool = False) -> MemoryLine | None:
        """Measure the memory. Return a memory line if it has grown, or if the kernel has killed a process for memory.

        Otherwise return None, unless `even_if_same` is true. Never raises.
        """
        current, written = state(), self._written
        self._current = current
        grown_bytes = current.resident_bytes - written.resident_bytes
        is_kill_new = (current.kills, current.machine_kills) != (written.kills, written.machine_kills)
        if (
            not even_if_same
            and not is_kill_new
            and grown_bytes < max(_MIN_GROWTH_BYTES, written.resident_bytes // _GROWTH_DIVISOR)
        ):
            return None
        self._written = current
        return MemoryLine(time.time_ns(), current)


class _Version(NamedTuple):
    """Names that depend on the version of control groups.

    Attributes:
        limit: The name of the file with the memory limit.
        used: The name of the file with the used memory.
        peak: The name of the file with the peak of the used memory.
        events: The name of the file with the number of kernel kills.
        inactive: The name of the inactive file pages in the file `memory.stat`.
    """

    limit: str
    used: str
    peak: str
    events: str
    inactive: str


_V2 = _Version("memory.max", "memory.current", "memory.peak", "memory.events", "inactive_file")
_V1 = _Version(
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "memory.max_usage_in_bytes",
    "memory.oom_control",
    "total_inactive_file",
)


def state(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> MemoryState:
    """Return the current memory. A value that can't be read is 0. Never raises.

    The control group of the process, its parent groups and the machine each have a limit. The result has the limit with
    the least free memory, because the kernel kills processes at this limit first.

    File pages that the kernel can drop do not count as used memory. In a control group, these are the inactive file
    pages. For the machine, `MemAvailable` includes them. The peak includes them, because the kernel records the peak in
    this way.
    """
    own_status = _numbers(proc / "self" / "status", 1024)
    machine_memory = _numbers(proc / "meminfo", 1024)
    limits = []
    if total := machine_memory.get("MemTotal", 0):
        used = max(0, total - machine_memory.get("MemAvailable", 0))
        limits.append(MemoryState(used_bytes=used, limit_bytes=total))
    folder, version = _group(proc, cgroups)
    if folder is not None:
        limits += _limits(folder, version, cgroups)
    return msgspec.structs.replace(
        min(limits, key=lambda limit: limit.limit_bytes - limit.used_bytes, default=MemoryState()),
        resident_bytes=own_status.get("VmRSS", 0),
        peak_bytes=own_status.get("VmHWM", 0),
        cgroup=str(folder or ""),
        kills=_numbers(folder / version.events).get("oom_kill", 0) if folder is not None else 0,
        machine_kills=_numbers(proc / "vmstat").get("oom_kill", 0),
    )


def kills(cgroup: str) -> int:
    """Return the number of processes of a control group that the kernel killed because memory ran out; 0 if unknown."""
    return max(_numbers(Path(cgroup, version.events)).get("oom_kill", 0) for version in (_V2, _V1)) if cgroup else 0


def peak_of(cgroup: str) -> int:
    """Return the peak of a control group's memory in bytes; 0 if the kernel does not record it."""
    return max(_number(Path(cgroup, version.peak)) for version in (_V2, _V1)) if cgroup else 0


def peak() -> int:
    """Return the peak of this process's resident memory in bytes; 0 if unknown."""
    return _numbers(_PROC / "self" / "status", 1024).get("VmHWM", 0)


def _group(proc: Path, cgroups: Path) -> tuple[Path | None, _Version]:
    """Return the folder of this process's control group and the version of control groups.

    The folder is None if no folder is found. A container may see only the root folder.
    """
    paths = {"": "", "memory": ""}
    for line in files.text(proc / "self" / "cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "" or "memory" in controllers.split(","):
            paths["memory" if controllers else ""] = path.strip("/")
    for root, path, version in ((cgroups, paths[""], _V2), (cgroups / "memory", paths["memory"], _V1)):
        for folder in (root / path, root):
            if files.exists(folder / version.events):
                return folder, version
    return None, _V2


def _limits(folder: Path, version: _Version, root: Path) -> Iterator[MemoryState]:
    """Yield the limit and the used memory of a control group and of each of its parents that has a limit."""
    for group in (folder, *folder.parents):
        limit = _number(group / version.limit)
        if 0 < limit < _NO_LIMIT:
            inactive = _numbers(group / "memory.stat").get(version.inactive, 0)
            used = max(0, _number(group / version.used) - inactive)
            yield MemoryState(limit_bytes=limit, used_bytes=used, used_peak_bytes=_number(group / version.peak))
        if group == root:
            return


def _number(path: Path) -> int:
    text = files.text(path).strip()
    return int(text) if text.isdecimal() and len(text) < 20 else 0


def _numbers(path: Path, unit: int = 1) -> dict[str, int]:
    """Return the numbers in a file of the kernel as a dict from name to number, each multiplied by `unit`.

    Each line of the file has a name and a number.
    """
    lines = (line.split() for line in files.text(path).splitlines())
    return {
        words[0].rstrip(":"): int(words[1]) * unit
        for words in lines
        if len(words) > 1 and words[1].isdecimal() and len(words[1]) < 16
    }
