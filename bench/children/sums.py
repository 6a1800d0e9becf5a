"""Makes a trace, or sums it up in one way: `sums.py make FOLDER MEGABYTES`, `sums.py WAY FOLDER`.

The first form also writes the true sums. The second form prints seconds, the peak of memory in MB, and the largest
relative error of the sums: of operators below a microsecond per call, and of all others.
"""

from __future__ import annotations

import gzip
import json
import random
import resource
import sys
import time
from pathlib import Path

# An operator, its maximum duration in us, and the operators that it calls.
_TREE = ("nn.Module: Linear_0", 12.0, [("aten::linear", 9.0, [("aten::t", 0.9, []), ("aten::addmm", 6.0, [])])])
_EVENT = (
    '  {\n    "ph": "X", "cat": "cpu_op", "name": "%s", "pid": 4000, "tid": 4000,\n    "ts": %.3f, "dur": %.3f,\n'
    '    "args": {\n      "External id": %d,"Record function id": 0, "Concrete Inputs": ["", "", "%d"], '
    '"Input type": ["float", "float", "Scalar"], "Input Strides": [[%d, 1], [32, 1], []], '
    '"Input Dims": [[%d, 32], [32, 32], []], "Ev Idx": %d\n    }\n  }'
)
_TRACE, _TRUE = "rank0.json.gz", "true.json"
_HEAD = b'{\n  "schemaVersion": 1,\n  "distributedInfo": {"backend": "gloo", "rank": 0, "world_size": 1},\n'
_BASE = b'  "baseTimeNanoseconds": 1790857026000000000,\n  "traceEvents": [\n'

# Number of calls and their total time in us, by operator.
Sums = dict[str, tuple[int, float]]


def make(folder: Path, size: int) -> None:
    """Write a trace of `size` bytes, and its true sums."""
    draw = random.Random(7)
    counts: dict[str, int] = {}
    totals: dict[str, int] = {}
    number = 0

    def events(tree: tuple[str, float, list[tuple]], start_ns: int, most_ns: int) -> tuple[list[str], int]:
        nonlocal number
        name, us, called = tree
        took = min(most_ns, draw.randrange(int(us * 500), int(us * 1000)))
        number += 1
        n = draw.randrange(1, 512)
        written = [_EVENT % (name, 4.3e12 + start_ns / 1000, took / 1000, number, n, n, n, number)]
        counts[name] = counts.get(name, 0) + 1
        totals[name] = totals.get(name, 0) + took
        inside = start_ns
        for child in called:
            more, child_took = events(child, inside, start_ns + took - inside)
            inside += child_took
            written += more
        return written, took

    written = start_ns = 0
    with gzip.open(folder / _TRACE, "wb", compresslevel=1) as file:
        file.write(_HEAD + _BASE)
        while written < size:
            more, took = events(_TREE, start_ns, 1 << 60)
            piece = ((",\n" if written else "") + ",\n".join(more)).encode()
            file.write(piece)
            written += len(piece)
            start_ns += took + 200
        file.write(b'\n  ],"traceName": "x" }\n')
    true = {name: (counts[name], totals[name] / 1000) for name in counts}
    (folder / _TRUE).write_text(json.dumps(true))


def autoprof(path: Path) -> Sums:
    from autoprof.traces.summary import summarize

    return {each.name: (each.calls, each.total_us) for each in summarize(path).operators}


def hta(path: Path) -> Sums:
    from hta.common.trace import Trace

    trace = Trace(trace_files={0: str(path)}, trace_dir=str(path.parent))
    trace.parse_traces(use_multiprocessing=False)
    rows = trace.get_trace(0)
    sums = rows.groupby("name")["dur"].agg(["count", "sum"])
    names = trace.symbol_table.get_sym_table()
    return {names[row.Index]: (int(row.count_), float(row.sum_)) for row in sums.add_suffix("_").itertuples()}


def plain(path: Path) -> Sums:
    sums: dict[str, list[float]] = {}
    with gzip.open(path) as file:
        for event in json.load(file)["traceEvents"]:
            found = sums.setdefault(event["name"], [0, 0.0])
            found[0] += 1
            found[1] += event["dur"]
    return {name: (int(calls), total) for name, (calls, total) in sums.items()}


def main(way: str, folder: Path) -> dict[str, float]:
    """Sum up the trace in one way and compare with the true sums."""
    true: Sums = json.loads((folder / _TRUE).read_text())
    started = time.perf_counter()
    found = {"autoprof": autoprof, "hta": hta, "plain": plain}[way](folder / _TRACE)
    seconds = time.perf_counter() - started
    wrong = {"short": 0.0, "long": 0.0}
    for name, (calls, total) in true.items():
        kind = "short" if total / calls < 1 else "long"
        _, said = found.get(name, (0, 0.0))
        wrong[kind] = max(wrong[kind], abs(said - total) / total)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1.024e-3
    return {"seconds": seconds, "peak": peak, **wrong}


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(Path(sys.argv[2]), int(float(sys.argv[3]) * 1e6))
    else:
        print(json.dumps(main(sys.argv[1], Path(sys.argv[2]))))
