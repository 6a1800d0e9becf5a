"""Memory usage of this process's device, or else of its host."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from autoprof.base import files, interrupts

DEVICE, HOST = "device", "host"
_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


def taken() -> tuple[float, str]:
    """Return the share of memory in use, from 0 to 1, and its owner.

    For `device` it is the peak of the memory that torch's allocator has reserved since the process began, or since the
    program reset the peak. For `host` it is the current use, relative to the cgroup's limit if it has one.
    """
    torch = sys.modules.get("torch")
    for name in ("cuda", "npu"):
        share = _of_device(getattr(torch, name, None)) if torch is not None else None
        if share is not None:
            return share, DEVICE
    return _of_host(), HOST


def _of_device(backend: Any) -> float | None:
    """Return the share of a device, or None if the process does not use it: a query would initialise the device."""
    if backend is None or not backend.is_initialized():
        return None
    device = backend.current_device()
    total: int = backend.get_device_properties(device).total_memory
    return float(backend.max_memory_reserved(device) / total) if total else None


def _of_host(cgroup: Path = _CGROUP, meminfo: Path = _MEMINFO) -> float:
    """Return the share of the host. Cached pages of files that can be dropped do not count."""
    for folder, limit_name, used_name, inactive in (
        (cgroup, "memory.max", "memory.current", "inactive_file"),
        (cgroup / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit = int(files.text(folder / limit_name))
            used = int(files.text(folder / used_name)) - _lines(folder / "memory.stat").get(inactive, 0)
        except (OSError, ValueError) as error:  # no limit, or no cgroup
            interrupts.pass_on(error)
            continue
        if 0 < limit < 1 << 60:
            return max(0.0, used / limit)
    try:
        values = _lines(meminfo)
        return 1 - values["MemAvailable:"] / values["MemTotal:"]
    except (OSError, KeyError, ZeroDivisionError) as error:
        interrupts.pass_on(error)
        return 0.0


def _lines(path: Path) -> dict[str, int]:
    lines = (line.split() for line in files.text(path).splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdecimal()}
