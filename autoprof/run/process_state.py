"""Reader of the parts of a snapshot that are not stacks: memory, torch's flight record, and the state of an engine.

torch's flight record is its list of the last collectives of this process.
"""

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
# Function that returns the state of a scheduler. If it can't read an item, it adds a text with the reason to the list.
ReadScheduler: TypeAlias = "Callable[[Any, list[str]], EngineState]"


class _SchedulerState(process.State):
    """The scheduler of the engine in this process, and the function that reads the state of the scheduler."""

    def begin(self) -> None:
        self.scheduler: weakref.ref[Any] | None = None
        self.read: ReadScheduler | None = None

    def in_child(self) -> None:
        self.begin()


_scheduler_state = _SchedulerState()


def register_scheduler(scheduler: object, read: ReadScheduler) -> None:
    """Keep the scheduler of this process, for snapshots. A scheduler that is registered later replaces it.

    Args:
        scheduler: The scheduler of an engine.
        read: The function that reads the state of the scheduler.
    """
    with seam.suppress(TypeError):  # the class of the scheduler does not support weak references
        _scheduler_state.scheduler, _scheduler_state.read = weakref.ref(scheduler), read


def _engine_state(left_out: list[str]) -> EngineState:
    """Return the state of the engine in this process as a dict; empty if there is no engine.

    If an item can't be read, add a text with the reason to `left_out`.
    """
    scheduler = _scheduler_state.scheduler() if _scheduler_state.scheduler is not None else None
    if scheduler is None or _scheduler_state.read is None:
        return {}
    return _scheduler_state.read(scheduler, left_out)


def read_part(
    parts: dict[str, Any], left_out: list[str], name: str, read: Callable[[], object], of: str = "engine."
) -> None:
    """Call `read`, and put the result into `parts` as `name`. If `read` raises, add a text to `left_out` instead.

    `read` may raise any exception, because releases of engines differ, the state may change while it is read, and a
    device may be lost.

    Args:
        parts: Dict from the name of a part to the part.
        left_out: List of texts about missing parts.
        name: The name of the part.
        read: Function that returns the part.
        of: The prefix of the name in `left_out`. The default is for an item of the engine's state.
    """
    try:
        parts[name] = read()
    except Exception as error:
        seam.pass_on(error)
        left_out.append(f"{of}{name}: {type(error).__name__}: {error}"[:200])


# Environment variables that set the size of torch's flight record. Only torch 2.8 and later read the first variable.
SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
# Size of the flight record, the same as the default of torch 2.11 and later. Up to torch 2.10 the default is 0, so
# nothing is recorded.
_ENTRIES = "2000"
_ON_BY_DEFAULT = (2, 11)


def enable_flight_record(environ: MutableMapping[str, str]) -> None:
    """Make torch record its collectives in this process.

    Do nothing if the user has set the size of the flight record, or if this release of torch records by default.

    Args:
        environ: The environment. torch reads the size from it when it makes the first process group.
    """
    if any(name in environ for name in SIZES):
        return
    version = getattr(sys.modules.get("torch"), "__version__", None)
    with seam.suppress(ImportError, KeyError, OSError, ValueError):  # torch is missing, or its metadata is damaged
        version = version or metadata.version("torch")
    match = re.match(r"(\d+)\.(\d+)", str(version))
    if match and (int(match[1]), int(match[2])) < _ON_BY_DEFAULT:
        environ[SIZES[1]] = _ENTRIES


def write_flight_record(folder: str) -> str:
    """Write torch's flight record into a folder. Return the name of the file, or an empty text if the record is empty.

    This function imports nothing. It does not block, because other threads hold torch's lock only while they add an
    entry, never during a collective. The stacks of the collectives are omitted, because torch would need seconds for
    them and would hold the GIL in this time.

    Raises:
        OSError: The file can't be written.
    """
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return ""
    records = [record for record in map(_dumped, _dumps()) if record["entries"]]
    if not records:
        return ""
    # A build of torch with NCCL has one recorder for NCCL, and one recorder for all other backends.
    record = records[0]
    for other_record in records[1:]:
        record["entries"] = sorted(
            [*record["entries"], *other_record["entries"]], key=lambda entry: entry["time_created_ns"]
        )
        record["pg_config"] = {**other_record.get("pg_config", {}), **record.get("pg_config", {})}
    record["pg_config"] = _groups(distributed) | {
        name: group for name, group in record.get("pg_config", {}).items() if name
    }
    # The rank must follow the prefix in the file name, because torch's analyser reads the rank there.
    name = f"{identity.HOST}-{os.getpid()}-rank_{distributed.get_rank()}"
    files.write(Path(folder, name), _bounded(record))
    return name


def _dumps() -> list[Callable[..., bytes]]:
    """Return the functions of torch that return a flight record.

    They are `_dump_nccl_trace` in builds with NCCL, and `_dump_fr_trace` from torch 2.8 on.
    """
    module = sys.modules.get("torch._C._distributed_c10d")
    functions = (getattr(module, name, None) for name in ("_dump_nccl_trace", "_dump_fr_trace"))
    return [function for function in functions if function is not None]


def _dumped(dump: Callable[..., bytes]) -> dict[str, Any]:
    record = pickle.loads(dump(includeCollectives=True, includeStackTraces=False, onlyActive=False))
    return record if isinstance(record, dict) and record.get("entries") else {"entries": []}


def _groups(distributed: Any) -> dict[str, dict[str, str]]:
    """Return a dict from the name of a process group to its description, in the form that torch's analyser reads.

    The record that torch 2.13 returns has no gloo groups, so they are added from here.
    """
    groups = {}
    world = distributed.distributed_c10d._world
    for group, ranks in list(world.pg_group_ranks.items()):
        # Only groups that this process belongs to are in `pg_names`.
        if group not in world.pg_names:
            continue
        name = str(world.pg_names[group])
        groups[name] = {"name": name, "desc": str(getattr(group, "group_desc", "")), "ranks": str(sorted(ranks))}
    return groups


def _bounded(record: dict[str, Any]) -> bytes:
    """Return the record as bytes, in the form in which torch writes it. If it would be too large, omit old entries."""
    content = pickle.dumps(record, protocol=2)
    while len(content) > MAX_STACKS_BYTES:
        entries = record["entries"]
        record = record | {"entries": entries[(len(entries) + 1) // 2 :]}
        content = pickle.dumps(record, protocol=2)
    return content


def with_process_state(taken: ProcessStacks, folder: str) -> ProcessStacks:
    """Return the snapshot with the memory, the engine's state and the name of the flight record. Never raises.

    The flight record is written into `folder`.
    """
    left_out = list(taken.left_out)
    parts: dict[str, Any] = {}
    read_part(parts, left_out, "memory", _memory, of="")
    read_part(parts, left_out, "device memory", _device_memory, of="")
    read_part(parts, left_out, "engine", lambda: _engine_state(left_out), of="")
    read_part(parts, left_out, "flight_record", lambda: write_flight_record(folder), of="")
    memory = parts.pop("memory", {}) | parts.pop("device memory", {})
    return msgspec.structs.replace(taken, memory=memory, **parts, left_out=left_out)


def _memory() -> dict[str, int]:
    """Return a dict from name to size in bytes, for the sizes of `ProcessStacks.memory` that are known."""
    memory = memory_state.state()
    sizes = {
        "resident": memory.resident_bytes,
        "peak_resident": memory.peak_bytes,
        "used": memory.used_bytes,
        "limit": memory.limit_bytes,
    }
    return {name: size for name, size in sizes.items() if size}


def _device_memory() -> dict[str, int]:
    """Return `device_used` and `device_total` of `ProcessStacks.memory`, for the devices of this process.

    The dict is empty if torch has reserved no memory. Only torch's own counters are read, because a call of the
    device's driver may wait for a hanging kernel.
    """
    torch = sys.modules.get("torch")
    for name in ("cuda", "npu"):
        backend: Any = getattr(torch, name, None)
        if backend is not None and backend.is_initialized():
            reserved_sizes = {number: int(backend.memory_reserved(number)) for number in range(backend.device_count())}
            used_sizes = {number: size for number, size in reserved_sizes.items() if size}
            total = sum(int(backend.get_device_properties(number).total_memory) for number in used_sizes)
            return {"device_used": sum(used_sizes.values()), "device_total": total} if used_sizes else {}
    return {}
