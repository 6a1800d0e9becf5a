"""Runner of the benchmarks: prints the tables of each benchmark and updates RESULTS.md.

python -m bench [--quick] [--turns N] [--thorough] [--keep FOLDER] [NAMES...]
"""

from __future__ import annotations

import argparse
import inspect
import os
import platform
import sys
import time
from collections.abc import Sequence
from importlib import import_module, metadata
from pathlib import Path

from bench import results
from bench.processes import Failed
from bench.results import Section

NAMES = (
    *("boot", "calls", "imports", "steps", "growth", "listening", "inside", "timeline", "stop", "memory", "merge"),
    *("sums", "large"),
)


def measure(name: str, *, quick: bool, turns: int | None, thorough: bool) -> Section:
    """Run one benchmark, and return its section of the results.

    Args:
        name: The name of the benchmark.
        quick: True to run only a few turns.
        turns: The number of turns; None for the benchmark's own number.
        thorough: True to include long measurements, which only some benchmarks have.

    Raises:
        Failed: The benchmark could not be measured.
    """
    module = import_module(f"bench.{name}")
    turns = turns or (module.QUICK if quick else module.TURNS)
    started = time.monotonic()
    findings = module.run_thoroughly(turns) if thorough else module.run(turns)
    return Section(
        name=name,
        about=inspect.getdoc(module) or "",
        machine=machine(),
        date=time.strftime("%Y-%m-%d"),
        quick=quick,
        turns=turns,
        minutes=(time.monotonic() - started) / 60,
        findings=findings,
    )


def machine() -> str:
    """Return a description of this machine, without a name that identifies the machine."""
    cores = len(os.sched_getaffinity(0))
    words = [f"{cores} core{'s' if cores > 1 else ''}", platform.machine(), f"Python {platform.python_version()}"]
    for target in ("torch", "verl"):
        try:
            words.append(f"{target} {metadata.version(target)}")
        except metadata.PackageNotFoundError:
            words.append(f"no {target}")
    return ", ".join(words)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the named benchmarks. Return 1 if one of them could not be measured, else 0."""
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure autoprof beside its peers.")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"benchmarks to run: {', '.join(NAMES)} (default: all)"
    )
    parser.add_argument("--quick", action="store_true", help="few turns, only to check that the benchmarks work")
    parser.add_argument("--turns", type=int, help="number of turns, instead of each benchmark's own")
    parser.add_argument("--thorough", action="store_true", help="large: also 4,096 ranks (half an hour, 5 GB of disk)")
    parser.add_argument("--keep", type=Path, help="folder of results.json and RESULTS.md (default: bench/)")
    parsed = parser.parse_args(arguments)
    if unknown := set(parsed.names) - set(NAMES):
        parser.error(f"no benchmark is called {', '.join(sorted(unknown))}; use {', '.join(NAMES)}")
    if parsed.thorough and parsed.names != ["large"]:
        parser.error("--thorough works only with the benchmark large")
    store = parsed.keep / results.STORE.name if parsed.keep else results.STORE
    page = parsed.keep / results.PAGE.name if parsed.keep else results.PAGE
    failed = False
    for name in parsed.names or NAMES:
        print(f"== {name} ==", flush=True)
        try:
            section = measure(name, quick=parsed.quick, turns=parsed.turns, thorough=parsed.thorough)
        except Failed as error:
            failed = True
            print(f"{name} could not be measured; its section is not changed.\n{error}\n", file=sys.stderr, flush=True)
            continue
        # Load and save after each benchmark, so that its result is kept if a later benchmark is interrupted.
        sections = results.load(store) | {name: section}
        results.save((sections[each] for each in NAMES if each in sections), store, page)
        print(results.render([section]).partition("## ")[2], flush=True)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
