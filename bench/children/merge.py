"""Makes traces, or merges them in one way: `merge.py make FOLDER RANKS MEGABYTES`, `merge.py WAY FOLDER [SOURCE]`.

The second form prints seconds, the peak of memory of all processes at work in MB, and the number of flows and bytes of
the result.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import random
import resource
import sys
import time
from pathlib import Path
from typing import Any

PROFILE_ID = "1700000000.5"

EVENT = """  {
    "ph": "X",
    "cat": "cpu_op",
    "name": "aten::%s",
    "pid": %d,
    "tid": %d,
    "ts": %.3f,
    "dur": %.3f
    ,
    "args": {
      "External id": %d,"Record function id": 0, "Concrete Inputs": ["", "", "%d"], "Input type": ["float", "float", \
"Scalar"], "Input Strides": [[%d, 1], [32, 1], []], "Input Dims": [[%d, 32], [32, 32], []], "Ev Idx": %d
    }
  }"""
_FLOW = """  {
    "ph": "%s",
    "id": %d,
    "pid": %d,
    "tid": %d,
    "ts": %.3f,
    "cat": "fwdbwd",
    "name": "fwdbwd",
    "bp": "e"
  }"""


def make(folder: Path, ranks: int, size: int) -> None:
    """Write a trace of `size` bytes for each rank, with SGLang's file names."""
    for rank in range(ranks):
        draw = random.Random(7)
        pid = 4000 + rank
        events: list[str] = []
        written = number = 0
        while written < size:
            number += 1
            ts = 4.3e12 + number * 3.1
            name = draw.choice(("mm", "add", "mul", "linear", "view", "transpose", "copy_", "empty", "silu"))
            n = draw.randrange(1, 512)
            events.append(EVENT % (name, pid, pid, ts, draw.random() * 9, number, n, n, n, number))
            if number % 20 == 0:
                events.append(_FLOW % ("s", number, pid, pid, ts))
                events.append(_FLOW % ("f", number, pid, pid + 1, ts + 1))
            written += len(events[-1])
        with gzip.open(folder / f"{PROFILE_ID}-TP-{rank}.trace.json.gz", "wb", compresslevel=1) as file:
            file.write(b'{\n  "schemaVersion": 1,\n  "baseTimeNanoseconds": 1790857026000000000,\n  "traceEvents": [\n')
            file.write(",\n".join(events).encode() + b'\n  ],"traceName": "x" }\n')


def autoprof(folder: Path, jobs: int) -> Path:
    from autoprof.traces.merge import merge
    from autoprof.traces.rewrite import Input

    paths = sorted(folder.glob("*-TP-*.gz"))
    output = folder / "autoprof.json.gz"
    merge([Input(path=path, label=path.name) for path in paths], output, jobs)
    return output


def sglang(folder: Path, source: str) -> Path:
    spec = importlib.util.spec_from_file_location("profile_merger", source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return Path(module.ProfileMerger(str(folder), PROFILE_ID).merge_chrome_traces())


def plain(folder: Path) -> Path:
    merged: dict[str, list[Any]] = {"traceEvents": []}
    for path in sorted(folder.glob("*-TP-*.gz")):
        with gzip.open(path, "rt") as source:
            merged["traceEvents"] += json.load(source)["traceEvents"]
    output = folder / "plain.json.gz"
    with gzip.open(output, "wt", compresslevel=1) as target:
        target.write(json.dumps(merged))
    return output


def flows(path: Path) -> int:
    import msgspec

    from autoprof.traces.reader import Reader

    decode = msgspec.json.Decoder(list[dict[str, Any]]).decode
    with Reader(path) as reader:
        return sum(event.get("ph") == "s" for events in reader.chunks(decode) for event in events)


def main(way: str, folder: Path, source: str) -> dict[str, float]:
    """Merge the traces in one way, remove the merged trace, and return the measurements."""
    cores = len(os.sched_getaffinity(0))
    at_work = min(cores, len(list(folder.glob("*-TP-*.gz")))) if way == "cores" else 0
    started = time.perf_counter()
    if way == "sglang":
        output = sglang(folder, source)
    elif way == "plain":
        output = plain(folder)
    else:
        output = autoprof(folder, cores if way == "cores" else 1)
    seconds = time.perf_counter() - started
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    found = {
        "seconds": seconds,
        "peak": (own.ru_maxrss + at_work * children.ru_maxrss) * 1.024e-3,
        "flows": flows(output),
        "bytes": output.stat().st_size,
    }
    output.unlink()
    return found


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(Path(sys.argv[2]), int(sys.argv[3]), int(float(sys.argv[4]) * 1e6))
    else:
        print(json.dumps(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])))
