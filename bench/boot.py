"""What autoprof adds to the start of a Python interpreter, side by side with what others pay, in one run.

    python bench/boot.py [RUNS]

Whole processes, in turns, user and system time of the children; medians and ratios to an interpreter without autoprof
in its environment. Who starts a run looks for recipes of other distributions when it first imports something that is
installed (here msgspec); its children are told. Peers: what a `.pth` would cost that imported wrapt, or logging, at
every start.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys

from autoprof._boot import FOUND, RUN_ID

CASES = {
    "no autoprof variable": ("pass", {}),
    "AUTOPROF=0": ("pass", {"AUTOPROF": "0"}),
    "AUTOPROF=1, no target imported": ("pass", {"AUTOPROF": "1"}),
    "import msgspec": ("import msgspec", {}),
    "AUTOPROF=1, the same, starts a run": ("import msgspec", {"AUTOPROF": "1"}),
    "AUTOPROF=1, the same, child of one": ("import msgspec", {"AUTOPROF": "1", RUN_ID: "x", FOUND: sys.prefix}),
    "import logging": ("import logging", {}),
    "import wrapt": ("import wrapt", {}),
}


def cpu_seconds(code: str, variables: dict[str, str]) -> float:
    """User and system time of one interpreter."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AUTOPROF")}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], env=kept | variables, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main(runs: int) -> None:
    taken: dict[str, list[float]] = {name: [] for name in CASES}
    for turn in range(runs + 2):
        for name, (code, variables) in CASES.items():
            seconds = cpu_seconds(code, variables)
            if turn >= 2:  # the first two warm the caches
                taken[name].append(seconds)
    base = statistics.median(taken["no autoprof variable"])
    print(f"{'':38}{'median':>9}{'min':>9}{'ratio':>8}   ({runs} runs each, CPU time)")
    for name, seconds in taken.items():
        middle = statistics.median(seconds)
        print(f"{name:38}{middle * 1e3:7.1f}ms{min(seconds) * 1e3:7.1f}ms{middle / base:8.2f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 60)
