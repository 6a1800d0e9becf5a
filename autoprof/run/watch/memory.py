"""Memory of this process, its host, its cgroup and its device, in bytes by name."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from autoprof.base import files, interrupts

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")
# A limit above this is none.
_NO_LIMIT = 1 << 60


def read(proc: Path = _PROC, cgroup: Path = _CGROUP) -> dict[str, int]:
    """Return what is known: the names are those of `ProcessStacks.memory`."""
    found: dict[str, int] = {}
    for path, names in (
        (proc / "self" / "status", {"VmRSS:": "resident", "VmHWM:": "peak_resident"}),
        (proc / "meminfo", {"MemTotal:": "host_total", "MemAvailable:": "host_used"}),
    ):
        try:
            lines = _lines(path)
        except OSError as error:
            interrupts.pass_on(error)
            continue
        found |= {name: lines[key] * 1024 for key, name in names.items() if key in lines}
    if "host_total" in found and "host_used" in found:
        found["host_used"] = found["host_total"] - found["host_used"]
    else:
        found.pop("host_used", None)
    return found | _of_cgroup(proc, cgroup) | _of_device()


def _of_cgroup(proc: Path, root: Path) -> dict[str, int]:
    """Return the limit of this process's cgroup, or of the nearest one above it that has one, and what is used there.

    Pages of files that can be dropped do not count.
    """
    try:
        groups = [line.split(":", 2) for line in files.text(proc / "self" / "cgroup").splitlines()]
    except OSError as error:  # no cgroups here
        interrupts.pass_on(error)
        return {}
    for _, controllers, own in (group for group in groups if len(group) == 3):
        if controllers == "":
            place, limit_name, used_name, inactive = root, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            place, inactive = root / "memory", "total_inactive_file"
            limit_name, used_name = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        # In a container the path is often that of the host, which is not there: its root is the container's own.
        names = [name for name in own.split("/") if name not in ("", "..")]
        for depth in range(len(names), -1, -1):
            folder = place.joinpath(*names[:depth])
            try:
                limit = int(files.text(folder / limit_name))
                used = int(files.text(folder / used_name)) - _lines(folder / "memory.stat").get(inactive, 0)
            except (OSError, ValueError) as error:  # there is no limit here
                interrupts.pass_on(error)
                continue
            if 0 < limit < _NO_LIMIT:
                return {"cgroup_used": max(0, used), "cgroup_limit": limit}
    return {}


def _of_device() -> dict[str, int]:
    """Return what torch's allocator holds of the devices that this process uses; nothing where it uses none.

    It asks torch alone: a call of the driver may wait for a kernel that hangs.
    """
    torch = sys.modules.get("torch")
    for name in ("cuda", "npu"):
        backend: Any = getattr(torch, name, None)
        try:
            if backend is None or not backend.is_initialized():
                continue
            held = {number: int(backend.memory_reserved(number)) for number in range(backend.device_count())}
            used = {number: size for number, size in held.items() if size}
            total = sum(int(backend.get_device_properties(number).total_memory) for number in used)
        except Exception as error:  # the device is lost
            interrupts.pass_on(error)
            continue
        return {"device_used": sum(used.values()), "device_total": total} if used else {}
    return {}


def _lines(path: Path) -> dict[str, int]:
    words = (line.split() for line in files.text(path).splitlines())
    return {each[0]: int(each[1]) for each in words if len(each) > 1 and each[1].isdecimal()}
