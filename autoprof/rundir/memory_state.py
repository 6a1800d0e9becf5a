"""Memory of this process and of its control group, and the number of processes killed because memory ran out.

The figures come from about ten small files of the kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from autoprof.base import files, interrupts
from autoprof.base.originals import os, time
from autoprof.rundir.records import MemoryLine, MemoryState

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
# Limits from here on mean "no limit": cgroup version 1 then shows a number near 2 ** 63.
_NO_LIMIT = 1 << 60
# A new line is written if the process has grown by 1/8 and by at least 64 MiB.
_GROWTH_DIVISOR, _MIN_GROWTH_BYTES = 8, 64 << 20


class MemoryWatch:
    """The memory of one process at the last line of its timeline, compared with its memory now."""

    def __init__(self) -> None:
        self._last = MemoryState()

    def first(self) -> MemoryState:
        """Return the current memory and keep it for later comparisons. Never raises."""
        self._last = state()
        return self._last

    def look(self, again: bool = False) -> MemoryLine | None:
        """Return a line if the memory has grown, a process was killed, or `again` is true; else None. Never raises."""
        now, last = state(), self._last
        grown = now.resident_bytes - last.resident_bytes
        killed = (now.kills, now.machine_kills) != (last.kills, last.machine_kills)
        if not again and not killed and grown < max(_MIN_GROWTH_BYTES, last.resident_bytes // _GROWTH_DIVISOR):
            return None
        self._last = now
        return MemoryLine(time.time_ns(), now)


def state(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> MemoryState:
    """Return the current memory; unreadable figures are 0. Never raises.

    Cached pages of files that the kernel can drop do not count as used.
    """
    own = _numbers(proc / "self" / "status", 1024)
    group_state = MemoryState()
    for folder, names in _groups(proc, cgroups):
        limit, group = _limit(folder, names[0], cgroups)
        if not limit:
            continue
        pages = _numbers(group / "memory.stat")
        droppable = pages.get("total_inactive_file", pages.get("inactive_file", 0))
        used, peak = max(0, _number(group / names[1]) - droppable), _number(group / names[2])
        kills = _numbers(folder / names[3]).get("oom_kill", 0)
        group_state = MemoryState(
            cgroup=str(folder), used_bytes=used, used_peak_bytes=peak, limit_bytes=min(limit, _NO_LIMIT), kills=kills
        )
        break
    meminfo = _numbers(proc / "meminfo", 1024)
    machine = meminfo.get("MemTotal", 0)
    if not group_state.limit_bytes or 0 < machine <= group_state.limit_bytes:
        used = max(0, machine - meminfo.get("MemAvailable", 0))
        group_state = MemoryState(
            cgroup=group_state.cgroup, used_bytes=used, limit_bytes=machine, kills=group_state.kills
        )
    return MemoryState(
        resident_bytes=own.get("VmRSS", 0),
        peak_bytes=own.get("VmHWM", 0),
        cgroup=group_state.cgroup,
        used_bytes=group_state.used_bytes,
        used_peak_bytes=group_state.used_peak_bytes,
        limit_bytes=group_state.limit_bytes,
        kills=group_state.kills,
        machine_kills=_numbers(proc / "vmstat").get("oom_kill", 0),
    )


def kills(cgroup: str) -> int:
    """Return the number of processes of a control group that the kernel has killed because memory ran out."""
    return max(_numbers(Path(cgroup, name)).get("oom_kill", 0) for name in (_V2[3], _V1[3])) if cgroup else 0


def peak_of(cgroup: str) -> int:
    """Return the peak of a control group's memory in bytes; 0 if the kernel does not record it."""
    return max(_number(Path(cgroup, name)) for name in (_V2[2], _V1[2])) if cgroup else 0


def peak() -> int:
    """Return the peak of this process's resident memory in bytes; 0 if unknown."""
    return _numbers(_PROC / "self" / "status", 1024).get("VmHWM", 0)


# Files in a group's folder: limit, current use, peak, number of kills. For cgroup versions 2 and 1.
_V2 = ("memory.max", "memory.current", "memory.peak", "memory.events")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.max_usage_in_bytes", "memory.oom_control")


def _groups(proc: Path, cgroups: Path) -> Iterator[tuple[Path, tuple[str, str, str, str]]]:
    """Yield the folders of this process's groups of both versions. A container may see only the root folder."""
    paths = {"": "", "memory": ""}
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "" or "memory" in controllers.split(","):
            paths["memory" if controllers else ""] = path.strip("/")
    for root, path, names in ((cgroups, paths[""], _V2), (cgroups / "memory", paths["memory"], _V1)):
        for folder in dict.fromkeys((root / path, root)):
            if files.exists(folder / names[3]):
                yield folder, names


def _limit(folder: Path, name: str, root: Path) -> tuple[int, Path]:
    """Return the lowest limit of a group and its parents, and the group with that limit; 0 without a limit file."""
    lowest, lowest_group = 0, folder
    for group in (folder, *folder.parents):
        limit = _number(group / name)
        if 0 < limit < _NO_LIMIT and (not lowest or limit < lowest):
            lowest, lowest_group = limit, group
        if group == root:
            break
    return lowest or (_NO_LIMIT if files.exists(folder / name) else 0), lowest_group


def _number(path: Path) -> int:
    text = _text(path).strip()
    return int(text) if text.isdecimal() and len(text) < 20 else 0


def _numbers(path: Path, unit: int = 1) -> dict[str, int]:
    """Return the numbers by name of a file with a name and a number per line, multiplied by `unit`."""
    lines = (line.split() for line in _text(path).splitlines())
    return {
        words[0].rstrip(":"): int(words[1]) * unit
        for words in lines
        if len(words) > 1 and words[1].isdecimal() and len(words[1]) < 16
    }


def _text(path: Path) -> str:
    try:
        descriptor = files.descriptor(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(descriptor, 1 << 16).decode(errors="replace")
        finally:
            os.close(descriptor)
    except OSError as error:
        interrupts.pass_on(error)
        return ""
