"""Memory of this process, of the control group that limits it, and the processes that the kernel has killed for it.

All is read from files of the kernel, which are closed again: some ten small reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from autoprof.base import files, interrupts
from autoprof.base.originals import os, time
from autoprof.rundir.records import MemoryLine, MemoryState

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
# From here on it is no limit: version 1 says a number near 2 ** 63 for none.
_NO_LIMIT = 1 << 60
# A line follows when the process has grown by an eighth, and by so much.
_GROWN, _LEAST = 8, 64 << 20


class Watch:
    """The memory of one process, as its timeline knows it."""

    def __init__(self) -> None:
        self._last = MemoryState()

    def first(self) -> MemoryState:
        """Return the memory now, against which later looks are held. Raises nothing."""
        self._last = state()
        return self._last

    def look(self, again: bool = False) -> MemoryLine | None:
        """Return a line where there is news, or where it is to stand there again. Raises nothing."""
        now, last = state(), self._last
        grown = now.resident_bytes - last.resident_bytes
        killed = (now.kills, now.machine_kills) != (last.kills, last.machine_kills)
        if not again and not killed and grown < max(_LEAST, last.resident_bytes // _GROWN):
            return None
        self._last = now
        return MemoryLine(time.time_ns(), now)


def state(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> MemoryState:
    """Return the memory now; what can't be read is 0. Raises nothing."""
    own = _numbers(proc / "self" / "status", 1024)
    found = MemoryState()
    for folder, names in _groups(proc, cgroups):
        limit, group = _limit(folder, names[0], cgroups)
        if not limit:
            continue
        used, peak = _number(group / names[1]), _number(group / names[2])
        kills = _numbers(folder / names[3]).get("oom_kill", 0)
        found = MemoryState(
            cgroup=str(folder), used_bytes=used, used_peak_bytes=peak, limit_bytes=min(limit, _NO_LIMIT), kills=kills
        )
        break
    meminfo = _numbers(proc / "meminfo", 1024)
    machine = meminfo.get("MemTotal", 0)
    if not found.limit_bytes or 0 < machine <= found.limit_bytes:
        used = max(0, machine - meminfo.get("MemAvailable", 0))
        found = MemoryState(cgroup=found.cgroup, used_bytes=used, limit_bytes=machine, kills=found.kills)
    return MemoryState(
        resident_bytes=own.get("VmRSS", 0),
        peak_bytes=own.get("VmHWM", 0),
        cgroup=found.cgroup,
        used_bytes=found.used_bytes,
        used_peak_bytes=found.used_peak_bytes,
        limit_bytes=found.limit_bytes,
        kills=found.kills,
        machine_kills=_numbers(proc / "vmstat").get("oom_kill", 0),
    )


def kills(cgroup: str) -> int:
    """Return how many processes of a control group the kernel has killed for memory so far."""
    return max(_numbers(Path(cgroup, name)).get("oom_kill", 0) for name in (_V2[3], _V1[3])) if cgroup else 0


def peak_of(cgroup: str) -> int:
    """Return the peak of a control group's memory, 0 where the kernel does not keep it."""
    return max(_number(Path(cgroup, name)) for name in (_V2[2], _V1[2])) if cgroup else 0


def peak() -> int:
    """Return the peak of this process's resident memory in bytes, 0 where it is not known."""
    return _numbers(_PROC / "self" / "status", 1024).get("VmHWM", 0)


# In a group's folder: the limit, what is used, the peak, how many were killed.
_V2 = ("memory.max", "memory.current", "memory.peak", "memory.events")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.max_usage_in_bytes", "memory.oom_control")


def _groups(proc: Path, cgroups: Path) -> Iterator[tuple[Path, tuple[str, str, str, str]]]:
    """Yield the folders of this process's group, of both versions; a container may see no more than the root."""
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
    """Return the lowest limit of a group and those above it, and whose it is; 0 where there is none."""
    lowest, whose = 0, folder
    for group in (folder, *folder.parents):
        limit = _number(group / name)
        if 0 < limit < _NO_LIMIT and (not lowest or limit < lowest):
            lowest, whose = limit, group
        if group == root:
            break
    return lowest or (_NO_LIMIT if files.exists(folder / name) else 0), whose


def _number(path: Path) -> int:
    text = _text(path).strip()
    return int(text) if text.isdecimal() and len(text) < 20 else 0


def _numbers(path: Path, unit: int = 1) -> dict[str, int]:
    """Return the numbers of a file with a name and a number in each line."""
    words = (line.split() for line in _text(path).splitlines())
    return {
        each[0].rstrip(":"): int(each[1]) * unit
        for each in words
        if len(each) > 1 and each[1].isdecimal() and len(each[1]) < 16
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
