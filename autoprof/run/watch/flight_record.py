"""Torch's flight record of this process: its last collectives, as torch's own analyser reads them.

`python -m torch.distributed.flight_recorder.fr_trace --prefix rank_ FOLDER` compares the records of all ranks.
"""

from __future__ import annotations

import pickle
import re
import sys
from collections.abc import Callable, MutableMapping
from importlib import metadata
from pathlib import Path
from typing import Any

from autoprof.base import files, identity, interrupts
from autoprof.base.originals import os
from autoprof.rundir.stacks import MOST_BYTES

# Variables with the size of torch's buffer: the first is of 2.8 and later.
SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
# The size that torch has by default from 2.11 on. Up to 2.10 it is 0, and nothing is recorded.
_ENTRIES = "2000"
_ON_BY_DEFAULT = (2, 11)


def enable(environ: MutableMapping[str, str]) -> None:
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


def write(folder: str) -> str:
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
    while len(content) > MOST_BYTES:
        entries = record["entries"]
        record = record | {"entries": entries[(len(entries) + 1) // 2 :]}
        content = pickle.dumps(record, protocol=2)
    return content
