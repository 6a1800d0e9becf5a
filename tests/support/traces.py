"""Invented traces in the layouts of Kineto and SGLang."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

Event = dict[str, Any]
BASE_NS = 1790857026000000000


def kineto(events: list[Event], base_ns: int | None = BASE_NS, base_last: bool = False) -> bytes:
    """Return a trace in Kineto's layout: each event on several lines, and other keys before and after the events."""
    base = "" if base_ns is None else f'"baseTimeNanoseconds": {base_ns}'
    head = ['"schemaVersion": 1', '"deviceProperties": []', '"displayTimeUnit": "ms"']
    tail = ['"traceName": "/runs/[1]/x.json"']
    (tail if base_last else head).extend([base] if base else [])
    body = ",\n".join("  " + json.dumps(event, indent=2).replace("\n", "\n  ") for event in events)
    return f'{{\n{", ".join(head)},\n  "traceEvents": [\n{body}\n  ],{", ".join(tail)} }}\n'.encode()


def dumped(events: list[Event], base_ns: int | None = BASE_NS) -> bytes:
    """Return a trace in the layout of `json.dump`, which SGLang uses for its merged traces."""
    base = {} if base_ns is None else {"baseTimeNanoseconds": base_ns}
    return json.dumps({"traceEvents": events} | base, separators=(",", ":")).encode()


def process(pid: int, name: str, count: int = 3, start_us: float = 100.0) -> list[Event]:
    """Return the events of a process: its names, `count` operators, `count` flows, and Kineto's own tracks."""
    events: list[Event] = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}},
        {"ph": "M", "name": "process_labels", "pid": pid, "tid": 0, "args": {"labels": "CPU"}},
        {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}},
        {"ph": "M", "name": "thread_name", "pid": pid, "tid": pid, "args": {"name": f"thread {pid}"}},
    ]
    for number in range(count):
        at = {"pid": pid, "tid": pid, "ts": start_us + number}
        events += [
            {"ph": "X", "cat": "cpu_op", "name": f"aten::op{number}", "dur": 0.5, "args": {"Ev Idx": number}, **at},
            {"ph": "s", "cat": "fwdbwd", "name": "fwdbwd", "id": number, **at},
            {"ph": "f", "cat": "fwdbwd", "name": "fwdbwd", "id": number, "bp": "e", **at},
        ]
    events.append(
        {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "P", "ts": start_us}
    )
    events.append({"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": start_us + count})
    return events


def save(path: Path, content: bytes) -> Path:
    """Write a trace, compressed if its name ends in `.gz`, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content, 1) if path.suffix == ".gz" else content)
    return path


def load(path: Path) -> dict[str, Any]:
    return json.loads(gzip.decompress(path.read_bytes()))
