"""Parts of a snapshot other than stacks: memory, torch's flight record, the state of an engine."""

from __future__ import annotations

import pickle
import re
import sys
import weakref
from collections.abc import Callable, MutableMapping
from importlib import metadata
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from autoprof.base import files, identity, process, seam
from autoprof.base.originals import os
from autoprof.rundir import memory_state
from autoprof.rundir.records import MAX_STACKS_BYTES, ProcessStacks

EngineState: TypeAlias = "dict[str, int | float | str]"
# Function that reads a scheduler's state. It adds missing items to the list, with the reason.
ReadScheduler: TypeAlias = "Callable[[Any, list[str]], EngineState]"


class _SchedulerState(process.State):
    """The scheduler of this process, and the function that reads its state."""

    def begin(self) -> None:
        self.scheduler: weakref.ref[Any] | None = None
        self.read: ReadScheduler | None = None

    def in_child(self) -> None:
        self.begin()


_scheduler_state = _SchedulerState()


def register_scheduler(scheduler: object, read: ReadScheduler) -> None:
    """Remember the scheduler of this process. A later one replaces it."""
    with seam.suppress(TypeError):  # its class does not support weak references
        _scheduler_state.scheduler, _scheduler_state.read = weakref.ref(scheduler), read


def _engine_state(left_out: list[str]) -> EngineState:
    """Return the state of the engine; empty without an engine. Add missing items to `left_out`."""
    scheduler = _scheduler_state.scheduler() if _scheduler_state.scheduler is not None else None
    if scheduler is None or _scheduler_state.read is None:
        return {}
    return _scheduler_state.read(scheduler, left_out)


def read_part(
    parts: dict[str, Any], left_out: list[str], name: str, read: Callable[[], object], of: str = "engine."
) -> None:
    """Read one part of a snapshot, by default an item of the engine's state. If that fails, add it to `left_out`.

    Reading may raise anything: releases differ, the state changes meanwhile, and a device may be lost.
    """
    try:
        parts[name] = read()
    except Exception as error:
        seam.pass_on(error)
        left_out.append(f"{of}{name}: {type(error).__name__}: {error}"[:200])


# Variables for the size of torch's flight record. torch 2.8 and later read the first one.
SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
# Default size from torch 2.11 on. Up to 2.10 the default is 0, so nothing is recorded.
_ENTRIES = "2000"
_ON_BY_DEFAULT = (2, 11)


def enable_flight_record(environ: MutableMapping[str, str]) -> None:
    """Let torch record its collectives in this process, if its release does not by default and the user set no size.

    Args:
        environ: The environment. torch reads it when it makes the first process group.
    """
    if any(name in environ for name in SIZES):
        return
    version = getattr(sys.modules.get("torch"), "__version__", None)
    with seam.suppress(ImportError, KeyError, OSError, ValueError):  # it is not installed, or its metadata is damaged
        version = version or metadata.version("torch")
    match = re.match(r"(\d+)\.(\d+)", str(version))
    if match and (int(match[1]), int(match[2])) < _ON_BY_DEFAULT:
        environ[SIZES[1]] = _ENTRIES


def write_flight_record(folder: str) -> str:
    """Write torch's flight record into a folder. Return the file's name, or an empty text if nothing was recorded.

    This imports nothing and does not block: other threads hold torch's lock only to add an entry, never during a
    collective. The stacks of the collectives are omitted, because torch needs seconds for them and holds the GIL.

    Raises:
        OSError: The file can't be written.
    """
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return ""
    records = [record for record in map(_dumped, _dumps()) if record["entries"]]
    if not records:
        return ""
    # A build with NCCL has one recorder for NCCL, and another one for all other backends.
    record = records[0]
    for other in records[1:]:
        record["entries"] = sorted([*record["entries"], *other["entries"]], key=lambda entry: entry["time_created_ns"])
        record["pg_config"] = {**other.get("pg_config", {}), **record.get("pg_config", {})}
    record["pg_config"] = _groups(distributed) | {
        name: group for name, group in record.get("pg_config", {}).items() if name
    }
    # torch's analyser reads the rank from the file name: it follows the prefix.
    name = f"{identity.HOST}-{os.getpid()}-rank_{distributed.get_rank()}"
    files.write(Path(folder, name), _bounded(record))
    return name


def _dumps() -> list[Callable[..., bytes]]:
    """Return torch's dump functions: `_dump_nccl_trace` in builds with NCCL, `_dump_fr_trace` from 2.8 on."""
    module = sys.modules.get("torch._C._distributed_c10d")
    functions = (getattr(module, name, None) for name in ("_dump_nccl_trace", "_dump_fr_trace"))
    return [function for function in functions if function is not None]


def _dumped(dump: Callable[..., bytes]) -> dict[str, Any]:
    read = pickle.loads(dump(includeCollectives=True, includeStackTraces=False, onlyActive=False))
    return read if isinstance(read, dict) and read.get("entries") else {"entries": []}


def _groups(distributed: Any) -> dict[str, dict[str, str]]:
    """Return the process groups in the form that torch's analyser reads. torch 2.13 omits the gloo groups."""
    groups = {}
    world = distributed.distributed_c10d._world
    for group, ranks in list(world.pg_group_ranks.items()):
        # Groups without this process are missing from `pg_names`.
        if group not in world.pg_names:
            continue
        name = str(world.pg_names[group])
        groups[name] = {"name": name, "desc": str(getattr(group, "group_desc", "")), "ranks": str(sorted(ranks))}
    return groups


def _bounded(record: dict[str, Any]) -> bytes:
    """Return the record as torch writes it, with only the latest entries if it would be too large."""
    content = pickle.dumps(record, protocol=2)
    while len(content) > MAX_STACKS_BYTES:
        entries = record["entries"]
        record = record | {"entries": entries[(len(entries) + 1) // 2 :]}
        content = pickle.dumps(record, protocol=2)
    return content


def with_process_state(taken: ProcessStacks, folder: str) -> ProcessStacks:
    """Return the snapshot with memory, engine and flight record, which is written into the folder. Never raises."""
    left_out = list(taken.left_out)
    parts: dict[str, Any] = {}
    read_part(parts, left_out, "memory", _memory, of="")
    read_part(parts, left_out, "device memory", _device_memory, of="")
    read_part(parts, left_out, "engine", lambda: _engine_state(left_out), of="")
    read_part(parts, left_out, "flight_record", lambda: write_flight_record(folder), of="")
    memory = parts.pop("memory", {}) | parts.pop("device memory", {})
    return msgspec.structs.replace(taken, memory=memory, **parts, left_out=left_out)


def _memory() -> dict[str, int]:
    """Return the known sizes in bytes, by the names of `ProcessStacks.memory`."""
    memory = memory_state.state()
    sizes = {
        "resident": memory.resident_bytes,
        "peak_resident": memory.peak_bytes,
        "used": memory.used_bytes,
        "limit": memory.limit_bytes,
    }
    return {name: size for name, size in sizes.items() if size}


def _device_memory() -> dict[str, int]:
    """Return the memory that torch has reserved on the devices of this process; empty if it uses none.

    Only torch's own counters are read: a call of the driver may wait for a hanging kernel.
    """
    torch = sys.modules.get("torch")
    for name in ("cuda", "npu"):
        backend: Any = getattr(torch, name, None)
        if backend is not None and backend.is_initialized():
            held = {number: int(backend.memory_reserved(number)) for number in range(backend.device_count())}
            used = {number: size for number, size in held.items() if size}
            total = sum(int(backend.get_device_properties(number).total_memory) for number in used)
            return {"device_used": sum(used.values()), "device_total": total} if used else {}
    return {}
