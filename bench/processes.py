"""Processes that benchmarks start: their environments, and their usage."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

T = TypeVar("T")

ROOT = Path(__file__).resolve().parent.parent
CHILDREN = ROOT / "bench" / "children"
# The environment of the project, with the real targets in it.
MAIN = Path(sys.executable)

_FOREIGN = ("AUTOPROF", "AUTOWRAPT_", "COVERAGE_", "DD_", "OTEL_", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE")


class Usage(NamedTuple):
    """Time of one process and of the children that it waited for, in seconds, and its output."""

    cpu_s: float
    wall_s: float
    output: str
    errors: str


class Failed(Exception):
    """A process did not end with status 0. The message has the end of its output."""


def environment(**variables: str) -> dict[str, str]:
    """Return the environment without variables of autoprof or a peer, plus `variables`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    return kept | variables


def interpreter(peer: str) -> Path | None:
    """Return the interpreter of a peer's environment, or None if it was not made yet (`make bench`)."""
    folder = ROOT / ".venvs" / f"bench-{peer}"
    return folder / "bin" / "python" if (folder / ".ready").exists() else None


def python_of(peer: str) -> Path | None:
    """Return the interpreter of a peer's environment, or the project's own if `peer` is empty."""
    return interpreter(peer) if peer else MAIN


def there(cases: Mapping[str, tuple[str, T]]) -> dict[str, tuple[Path, T]]:
    """Return the cases whose peers are installed, with interpreters in place of the peers."""
    return {case: (python, what) for case, (peer, what) in cases.items() if (python := python_of(peer))}


def absent(cases: Mapping[str, tuple[str, object]]) -> list[str]:
    """Return notes on the cases whose peers are missing."""
    return [missing(peer) for peer in dict.fromkeys(peer for peer, _ in cases.values()) if python_of(peer) is None]


def site_packages(python: Path) -> Path:
    """Return the folder of an environment's packages."""
    return next(python.parent.parent.glob("lib/python*/site-packages"))


def missing(peer: str) -> str:
    """Return the note on a missing peer."""
    return f"{peer} was not measured: its environment is missing (`make bench` creates it)"


def run(
    command: Sequence[str | Path],
    variables: Mapping[str, str] | None = None,
    *,
    cwd: Path | None = None,
    timeout_s: float = 600,
) -> Usage:
    """Run a command to its end.

    Raises:
        Failed: Its exit status is not 0, or it took longer than `timeout_s`.
    """
    started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    try:
        done = subprocess.run(
            [str(part) for part in command],
            env=environment(**(variables or {})),
            cwd=cwd or ROOT,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Failed(f"{command[0]}: still running after {timeout_s:g} s") from None
    wall_s = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise Failed(f"{command[0]}: status {done.returncode}: {(done.stderr or done.stdout)[-2000:]}")
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Usage(cpu_s, wall_s, done.stdout, done.stderr)
