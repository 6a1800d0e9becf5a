"""Parts of a snapshot other than stacks: memory, torch's flight record, the state of an engine."""

from __future__ import annotations

import pickle
import re
import sys
import weakref
from collections.abc import Callable, MutableMapping
from importlib import metadata
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import msgspec

from autoprof.base import files, identity, interrupts, process
from autoprof.base.originals import os
from autoprof.rundir.records import MAX_STACKS_BYTES, ProcessStacks

EngineState: TypeAlias = "dict[str, int | float | str]"
# Reads a scheduler's state; what it can't find it adds to the list, with the reason.
ReadScheduler: TypeAlias = "Callable[[Any, list[str]], EngineState]"


class _SchedulerState(process.State):
    """The scheduler of this process, and how to read it."""

    def begin(self) -> None:
        self.scheduler: weakref.ref[Any] | None = None
        self.read: ReadScheduler | None = None

    def in_child(self) -> None:
        self.begin()


_scheduler_state = _SchedulerState()


def register_scheduler(scheduler: object, read: ReadScheduler) -> None:
    """Note the scheduler of this process; of several the last is told."""
    try:
        _scheduler_state.scheduler, _scheduler_state.read = weakref.ref(scheduler), read
    except TypeError as error:  # of a class that takes no such references
        interrupts.pass_on(error)


def engine_state(left_out: list[str]) -> EngineState:
    """Return the state of the engine; empty where this process has none. What is missing is added to `left_out`."""
    scheduler = _scheduler_state.scheduler() if _scheduler_state.scheduler is not None else None
    if scheduler is None or _scheduler_state.read is None:
        return {}
    try:
        return _scheduler_state.read(scheduler, left_out)
    except Exception as error:  # it changes while it is read, or is of another release
        interrupts.pass_on(error)
        left_out.append(f"engine: {type(error).__name__}: {error}"[:200])
        return {}


def read_part(found: EngineState, left_out: list[str], name: str, read: Callable[[], int | float | str]) -> None:
    """Read one part of the state; another release may not have it, and it changes meanwhile."""
    try:
        found[name] = read()
    except Exception as error:
        interrupts.pass_on(error)
        left_out.append(f"engine.{name}: {type(error).__name__}: {error}"[:200])


# Variables with the size of torch's buffer: the first is of 2.8 and later.
SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
# The size that torch has by default from 2.11 on. Up to 2.10 it is 0, and nothing is recorded.
_ENTRIES = "2000"
_ON_BY_DEFAULT = (2, 11)


def enable_flight_record(environ: MutableMapping[str, str]) -> None:
    """Have this process's torch record its collectives, where it does not by default and the user has said nothing.

    Args:
        environ: The environment, which torch reads with the first group of processes.
    """
    if any(name in environ for name in SIZES):
        return
    try:
        version = str(getattr(sys.modules.get("torch"), "__version__", "")) or metadata.version("torch")
    except Exception as error:  # there is none, or its metadata is damaged
        interrupts.pass_on(error)
        return
    match = re.match(r"(\d+)\.(\d+)", version)
    if match and (int(match[1]), int(match[2])) < _ON_BY_DEFAULT:
        environ[SIZES[1]] = _ENTRIES


def write_flight_record(folder: str) -> str:
    """Write the record into a folder; return the name of its file, or an empty text where torch has recorded nothing.

    Nothing is imported. Torch's lock is held by others for the entry of a collective alone, never during one, and the
    stacks of the collectives are left out: torch takes seconds for them, with the interpreter standing still.

    Raises:
        OSError: It can't be written.
    """
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return ""
    records = [record for record in map(_dumped, _dumps()) if record["entries"]]
    if not records:
        return ""
    # A build with NCCL has a recorder for it, and another for all other backends.
    record = records[0]
    for other in records[1:]:
        record["entries"] = sorted([*record["entries"], *other["entries"]], key=lambda entry: entry["time_created_ns"])
        record["pg_config"] = {**other.get("pg_config", {}), **record.get("pg_config", {})}
    record["pg_config"] = _groups(distributed) | {
        name: group for name, group in record.get("pg_config", {}).items() if name
    }
    # The analyser takes what stands after the prefix for the rank.
    name = f"{identity.HOST}-{os.getpid()}-rank_{distributed.get_rank()}"
    files.write(Path(folder, name), _bounded(record))
    return name


def _dumps() -> list[Callable[..., bytes]]:
    """Return torch's functions: `_dump_nccl_trace` in builds with NCCL, `_dump_fr_trace` from 2.8 on."""
    module = sys.modules.get("torch._C._distributed_c10d")
    found = (getattr(module, name, None) for name in ("_dump_nccl_trace", "_dump_fr_trace"))
    return [function for function in found if function is not None]


def _dumped(dump: Callable[..., bytes]) -> dict[str, Any]:
    read = pickle.loads(dump(includeCollectives=True, includeStackTraces=False, onlyActive=False))
    return read if isinstance(read, dict) and read.get("entries") else {"entries": []}


def _groups(distributed: Any) -> dict[str, dict[str, str]]:
    """Return the groups of processes as the analyser takes them: torch 2.13 does not name those of gloo."""
    found = {}
    world = distributed.distributed_c10d._world
    for group, ranks in list(world.pg_group_ranks.items()):
        # A number stands for the groups that this process is not in.
        if group not in world.pg_names:
            continue
        name = str(world.pg_names[group])
        found[name] = {"name": name, "desc": str(getattr(group, "group_desc", "")), "ranks": str(sorted(ranks))}
    return found


def _bounded(record: dict[str, Any]) -> bytes:
    """Return the record as torch writes it, with as many of the last entries as there is room for."""
    content = pickle.dumps(record, protocol=2)
    while len(content) > MAX_STACKS_BYTES:
        entries = record["entries"]
        record = record | {"entries": entries[(len(entries) + 1) // 2 :]}
        content = pickle.dumps(record, protocol=2)
    return content


_Found = TypeVar("_Found")


def with_process_state(taken: ProcessStacks, folder: str) -> ProcessStacks:
    """Return a snapshot with these parts added; write the flight record into the folder. Raises nothing."""
    left_out = list(taken.left_out)
    engine: EngineState = {}
    nothing: dict[str, int] = {}
    return msgspec.structs.replace(
        taken,
        memory=_tried("memory", lambda: read_memory(), nothing, left_out),
        engine=_tried("engine", lambda: engine_state(left_out), engine, left_out),
        flight_record=_tried("flight record", lambda: write_flight_record(folder), "", left_out),
        left_out=left_out,
    )


def _tried(name: str, work: Callable[[], _Found], without: _Found, left_out: list[str]) -> _Found:
    try:
        return work()
    except Exception as error:
        interrupts.pass_on(error)
        left_out.append(f"{name}: {type(error).__name__}: {error}"[:200])
        return without


_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")
# A limit above this is none.
_NO_LIMIT = 1 << 60


def read_memory(proc: Path = _PROC, cgroup: Path = _CGROUP) -> dict[str, int]:
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
