"""Reader of torch's flight records: a script that `hangs/collectives.py` runs in a separate process.

A flight record is a pickle, and a pickle can run any code. This script loads only lists, dicts, strings and numbers,
with limited memory, and writes them to `facts.json`. If torch is installed, torch's own analyser reads sanitized copies
of the records, and its results go to `torch.json`. The analyser may raise, exit or print: nothing depends on it. The
script itself uses the standard library only.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import resource
import stat
import sys
from typing import Any

MAX_RECORD_BYTES = 8 << 20
# Address space of this process while it loads records.
_MAX_MEMORY_BYTES = 4 << 30
# Ended and unfinished collectives that are kept of each process, the last and the first ones.
_MAX_ENDED, _MAX_OPEN = 64, 256
_MAX_FRAMES = 30
# Tensors of a collective, and dimensions of a tensor.
_MAX_SIZES = 64


class _Plain(pickle.Unpickler):
    """An unpickler that creates only lists, dicts, tuples, strings and numbers."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it would create a {module}.{name}")


def record(path: str) -> dict[str, Any]:
    """Read a flight record.

    Raises:
        OSError: The file can't be read.
        ValueError: The file is too large, not a regular file, or not a flight record.
        Exception: Any other error of pickle, which a damaged file can cause.
    """
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("not a regular file")
        if status.st_size > MAX_RECORD_BYTES:
            raise ValueError(f"larger than {MAX_RECORD_BYTES >> 20} MiB")
        content = _Plain(file).load()
    if not isinstance(content, dict):
        raise ValueError("not a flight record")
    entries = [made for each in _list(content.get("entries")) if (made := _entry(each)) is not None]
    last: dict[str, int] = {}
    for each in entries:
        if not each["is_p2p"]:
            last[each["group"]] = max(last.get(each["group"], -1), each["collective_seq_id"])
    unfinished = [each for each in entries if not each["retired"]][:_MAX_OPEN]
    ended = [each for each in entries if each["retired"]][-_MAX_ENDED:]
    return {
        "version": _text(content.get("version")),
        "groups": _groups(content, entries),
        "last": last,
        "entries": sorted([*ended, *unfinished], key=lambda each: int(each["record_id"])),
    }


def _groups(content: dict[str, Any], entries: list[dict[str, Any]]) -> dict[str, list[int]]:
    """Return the ranks of each group that the record describes."""
    known = {}
    configured = content.get("pg_config")
    for name, each in configured.items() if isinstance(configured, dict) else ():
        ranks = each.get("ranks") if isinstance(each, dict) else None
        known[_text(name)] = [int(word) for word in re.findall(r"\d{1,7}", _text(ranks))]
    names = {each["group"] for each in entries}
    # gloo's groups have empty names there (torch 2.13), so only one of several is recorded.
    if "" in known and len(names - known.keys()) == 1:
        known[(names - known.keys()).pop()] = known[""]
    return {name: known[name] for name in names if name in known}


def _entry(each: Any) -> dict[str, Any] | None:
    if not isinstance(each, dict):
        return None
    group = each.get("process_group")
    if not isinstance(group, (tuple, list)) or len(group) != 2:
        return None
    frames = [frame for frame in _list(each.get("frames"))[:_MAX_FRAMES] if isinstance(frame, dict)]
    return {
        "group": _text(group[0]),
        "description": _text(group[1]),
        "name": _text(each.get("profiling_name")),
        "record_id": _number(each.get("record_id")),
        "collective_seq_id": _number(each.get("collective_seq_id")),
        "p2p_seq_id": _number(each.get("p2p_seq_id")),
        "is_p2p": bool(each.get("is_p2p")),
        "state": _text(each.get("state")),
        # Older records lack `retired`; use `state`.
        "retired": each["retired"] is True if "retired" in each else each.get("state") == "completed",
        "time_created_ns": _number(each.get("time_created_ns")),
        "timeout_ms": _number(each.get("timeout_ms")),
        "pg_id": _number(each.get("pg_id")),
        "op_id": _number(each.get("op_id")),
        **{name: _sizes(each.get(name)) for name in ("input_sizes", "output_sizes")},
        **{
            name: [_text(kind) for kind in _list(each.get(name))[:_MAX_SIZES]]
            for name in ("input_dtypes", "output_dtypes")
        },
        "frames": [
            {
                "function": _text(frame.get("name")),
                "file": _text(frame.get("filename")),
                "line": _number(frame.get("line")),
            }
            for frame in frames
        ],
    }


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: Any) -> str:
    return value[:1000].encode("utf-8", "replace").decode() if isinstance(value, str) else ""


def _number(value: Any) -> int:
    return value if isinstance(value, int) and abs(value) < 1 << 62 else 0


def _sizes(value: Any) -> list[list[int]]:
    return [[_number(size) for size in _list(each)[:_MAX_SIZES]] for each in _list(value)[:_MAX_SIZES]]


def mended(processes: list[dict[str, Any]]) -> None:
    """Complete the groups of each world: if no record describes a group, its ranks are its callers."""
    worlds: dict[str, dict[str, list[int]]] = {}
    callers: dict[tuple[str, str], set[int]] = {}
    described: dict[tuple[str, str], str] = {}
    for each in processes:
        for name, ranks in each["groups"].items():
            worlds.setdefault(each["world"], {}).setdefault(name, ranks)
        for entry in each["entries"]:
            callers.setdefault((each["world"], entry["group"]), set()).add(each["rank"])
            described.setdefault((each["world"], entry["group"]), entry["description"])
    for (world, group), ranks in callers.items():
        worlds.setdefault(world, {}).setdefault(group, sorted(ranks))
    for each in processes:
        known = worlds.get(each["world"], {})
        each["descriptions"] = {name: described.get((each["world"], name), "") for name in known}
        # Data-parallel groups share a name, so the same name may mean other ranks in another process.
        each["groups"] = {**{name: ranks for name, ranks in known.items() if each["rank"] in ranks}, **each["groups"]}
    lowest: dict[tuple[str, str, tuple[int, ...]], int] = {}
    for each in processes:
        for entry in each["entries"]:
            if not entry["retired"]:
                key = _key(each, entry)
                lowest[key] = min(lowest.get(key, sys.maxsize), entry["collective_seq_id"])
    for each in processes:
        each["entries"] = [
            entry
            for entry in each["entries"]
            if entry["collective_seq_id"] >= lowest.get(_key(each, entry), sys.maxsize)
        ]


def _key(each: dict[str, Any], entry: dict[str, Any]) -> tuple[str, str, tuple[int, ...]]:
    return each["world"], entry["group"], tuple(each["groups"].get(entry["group"], ()))


def analysed(processes: list[dict[str, Any]], folder: str) -> list[dict[str, Any]]:
    """Return the results of torch's analyser for each world."""
    from torch.distributed.flight_recorder.components.builder import build_db
    from torch.distributed.flight_recorder.components.config_manager import JobConfig
    from torch.distributed.flight_recorder.components.loader import read_dir

    found = []
    for number, world in enumerate(sorted({each["world"] for each in processes})):
        own = os.path.join(folder, f"world{number}")
        os.mkdir(own)
        of = [each for each in processes if each["world"] == world]
        for each in of:
            with open(os.path.join(own, f"rank_{each['rank']}"), "wb") as file:
                pickle.dump(_as_torch(each), file)
        try:
            arguments = JobConfig().parse_args([own, "--allow-incomplete-ranks", "-p", "rank_"])
            database = build_db(*_read(read_dir, arguments))
        except BaseException as error:  # the analyser asserts, and exits
            found.append({"world": world, "error": f"{type(error).__name__}: {error}"[:300]})
            continue
        for collective in database.collectives:
            missing, mismatched = collective.missing_ranks or (), collective.mismatch_collectives or {}
            if missing or mismatched:
                found.append(
                    {
                        "world": world,
                        "group": collective.group_id,
                        "ranks": sorted(collective.expected_ranks),
                        "sequence": collective.collective_seq_id,
                        "missing": sorted(missing),
                        "mismatched": {str(rank): str(each.type_of_mismatch) for rank, each in mismatched.items()},
                    }
                )
    return found


def _read(read_dir: Any, arguments: Any) -> tuple[Any, Any, Any]:
    details, version = read_dir(arguments)
    return details, arguments, version


def _as_torch(each: dict[str, Any]) -> dict[str, Any]:
    entries = [
        {
            **{name: value for name, value in entry.items() if name not in ("group", "description", "name", "frames")},
            # The analyser drops entries that other ranks no longer have. Renumbered, all ranks begin with the same one.
            "record_id": place,
            "process_group": (entry["group"], entry["description"]),
            "profiling_name": entry["name"],
            "frames": [],
            "time_discovered_started_ns": None,
            "time_discovered_completed_ns": None,
        }
        for place, entry in enumerate(each["entries"])
    ]
    groups = {
        name: {"name": name, "desc": each["descriptions"].get(name, ""), "ranks": str(ranks)}
        for name, ranks in each["groups"].items()
    }
    return {"version": each["version"], "pg_config": groups, "pg_status": {}, "entries": entries}


def main(folder: str) -> None:
    """Read a list of records from standard input, and write `facts.json` and `torch.json` into `folder`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(
        resource.RLIMIT_AS,
        (_MAX_MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(_MAX_MEMORY_BYTES, hard), hard),
    )
    processes, left_out = [], []
    for each in json.load(sys.stdin):
        try:
            processes.append({**each, **record(each["path"])})
        except Exception as error:  # a damaged pickle can raise any exception
            left_out.append(f"{os.path.basename(each['path'])}: {type(error).__name__}: {error}"[:300])
    mended(processes)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    _write(folder, "facts.json", {"processes": processes, "left_out": left_out})
    if any(not entry["retired"] for each in processes for entry in each["entries"]):
        try:
            results = analysed(processes, folder)
        except BaseException as error:  # torch is missing, or its analyser has another form
            results = [{"error": f"{type(error).__name__}: {error}"[:300]}]
        _write(folder, "torch.json", results)


def _write(folder: str, name: str, content: Any) -> None:
    path = os.path.join(folder, name)
    with open(f"{path}.part", "w", encoding="utf-8") as file:
        json.dump(content, file)
    os.replace(f"{path}.part", path)


if __name__ == "__main__":
    # torch must not import the modules beside this script.
    sys.path.pop(0)
    main(sys.argv[1])
