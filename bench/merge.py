"""How long merging the traces of several ranks takes, and how much memory, side by side in one run.

    python bench/merge.py [--ranks 4] [--mb 50] [--sglang PROFILE_MERGER]

The traces are made up in Kineto's layout, of equal content. autoprof's merge runs in one process and in as many as
there are cores for; beside it SGLang's own `ProfileMerger`, where its source is (by default in .venvs, which `make
test-engines` makes), and the shortest merge that is right about nothing: `json.load`, one list, `json.dumps`, gzip at
level 1. Each runs in a process of its own. Memory is the peak of all processes at work. That the
results are right is for tests/test_merge.py; only the flows are counted here.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import multiprocessing
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PROFILE_ID = "1700000000.5"

_EVENT = """  {
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
    """Write a trace of `size` bytes for each rank, named as SGLang's."""
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
            events.append(_EVENT % (name, pid, pid, ts, draw.random() * 9, number, n, n, n, number))
            if number % 20 == 0:
                events.append(_FLOW % ("s", number, pid, pid, ts))
                events.append(_FLOW % ("f", number, pid, pid + 1, ts + 1))
            written += len(events[-1])
        with gzip.open(folder / f"{PROFILE_ID}-TP-{rank}.trace.json.gz", "wb", compresslevel=1) as file:
            file.write(b'{\n  "schemaVersion": 1,\n  "baseTimeNanoseconds": 1790857026000000000,\n  "traceEvents": [\n')
            file.write(",\n".join(events).encode() + b'\n  ],"traceName": "x" }\n')


def autoprof(folder: Path, jobs: int) -> Path:
    from autoprof.traces.merge import Input, merge

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
    from autoprof.traces.reader import Reader

    with Reader(path) as reader:
        return sum(event.get("ph") == "s" for events in reader.chunks(json.loads) for event in events)


def work(name: str, folder: Path, source: str) -> None:
    """In a process of its own: merge, and print seconds and the peak of memory in MB."""
    started = time.perf_counter()
    if name == "sglang":
        output = sglang(folder, source)
    elif name == "plain":
        output = plain(folder)
    else:
        output = autoprof(folder, len(os.sched_getaffinity(0)) if name == "cores" else 1)
    seconds = time.perf_counter() - started
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    at_work = min(len(os.sched_getaffinity(0)), len(list(folder.glob("*-TP-*.gz")))) if name == "cores" else 0
    print(json.dumps([str(output), seconds, (own.ru_maxrss + at_work * children.ru_maxrss) / 1024]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--mb", type=float, default=50, help="megabytes of JSON a rank")
    found = sorted(ROOT.glob(".venvs/*/lib/python*/site-packages/sglang/srt/utils/profile_merger.py"))
    parser.add_argument("--sglang", default=str(found[-1]) if found else "", help="SGLang's profile_merger.py")
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.work:
        work(parsed.work[0], Path(parsed.work[1]), parsed.sglang)
        return
    names = {"one": "autoprof, one process", "cores": "autoprof, all cores", "plain": "json.load, json.dumps"}
    if parsed.sglang:
        names["sglang"] = "SGLang's ProfileMerger"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # In a process of its own, too: a child begins with the peak of memory of the process that starts it.
        making = multiprocessing.get_context("spawn").Process(
            target=make, args=(folder, parsed.ranks, int(parsed.mb * 1e6))
        )
        making.start()
        making.join()
        results = {}
        for each in names:
            command = [sys.executable, __file__, "--sglang", parsed.sglang, "--work", each, str(folder)]
            said = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
            output, seconds, peak_mb = json.loads(said)
            results[each] = (seconds, peak_mb, Path(output).stat().st_size / 1e6, flows(Path(output)))
            Path(output).unlink()
    assert len({result[-1] for result in results.values()}) == 1, results
    base = results["one"]
    print(f"{parsed.ranks} traces of {parsed.mb:g} MB of JSON")
    print(f"{'':26}{'s':>8}{'ratio':>8}{'peak MB':>10}{'ratio':>8}{'file MB':>10}")
    for each, (seconds, peak_mb, size_mb, _) in results.items():
        ratios = seconds / base[0], peak_mb / base[1]
        print(f"{names[each]:26}{seconds:8.1f}{ratios[0]:8.2f}{peak_mb:10.0f}{ratios[1]:8.2f}{size_mb:10.1f}")


if __name__ == "__main__":
    main()
