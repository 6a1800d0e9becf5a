"""Processes that benchmarks start: the environments, and the time that a process takes."""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

T = TypeVar("T")

ROOT = Path(__file__).resolve().parent.parent
CHILDREN = ROOT / "bench" / "children"
# The interpreter of the project's environment, which has the real targets.
MAIN = Path(sys.executable)

_COLLECTED = re.compile(r"Collected : (\d+)")
_FOREIGN = ("AUTOPROF", "AUTOWRAPT_", "COVERAGE_", "DD_", "OTEL_", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE")


class Usage(NamedTuple):
    """Seconds that a process and the children that it waited for took, and the output of the process."""

    cpu_s: float
    wall_s: float
    output: str
    errors: str


class Failed(Exception):
    """A process did not end with status 0, or a measurement failed. The message gives the end of the output."""


def environment(**variables: str) -> dict[str, str]:
    """Return the environment variables, without variables of autoprof and of peers, but with `variables`."""
    inherited_variables = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    return inherited_variables | variables


def interpreter(peer: str) -> Path | None:
    """Return the interpreter of a peer's environment. Return None if `make bench` has not made the environment."""
    folder = ROOT / ".venvs" / f"bench-{peer}"
    return folder / "bin" / "python" if (folder / ".ready").exists() else None


def python_of(peer: str) -> Path | None:
    """Return the interpreter of a peer's environment. If `peer` is empty, return the project's interpreter."""
    return interpreter(peer) if peer else MAIN


def there(cases: Mapping[str, tuple[str, T]]) -> dict[str, tuple[Path, T]]:
    """Return the cases whose peers are installed: dict from case to the peer's interpreter and the other value."""
    return {case: (python, what) for case, (peer, what) in cases.items() if (python := python_of(peer))}


def absent(cases: Mapping[str, tuple[str, object]]) -> list[str]:
    """Return a note for each peer whose environment is missing."""
    return [missing(peer) for peer in dict.fromkeys(peer for peer, _ in cases.values()) if python_of(peer) is None]


def site_packages(python: Path) -> Path:
    """Return the folder of packages in the environment of an interpreter."""
    return next(python.parent.parent.glob("lib/python*/site-packages"))


def missing(peer: str) -> str:
    """Return the note for a peer whose environment is missing."""
    return f"{peer} was not measured: its environment is missing (`make bench` creates it)"


def run(
    command: Sequence[str | Path],
    variables: Mapping[str, str] | None = None,
    *,
    cwd: Path | None = None,
    timeout_s: float = 600,
) -> Usage:
    """Run a command to its end, and return its usage.

    Raises:
        Failed: The exit status is not 0, or the command took longer than `timeout_s`.
    """
    start_s, usage_before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    try:
        completed = subprocess.run(
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
    wall_s = time.perf_counter() - start_s
    usage_after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if completed.returncode:
        raise Failed(f"{command[0]}: status {completed.returncode}: {(completed.stderr or completed.stdout)[-2000:]}")
    cpu_s = usage_after.ru_utime + usage_after.ru_stime - usage_before.ru_utime - usage_before.ru_stime
    return Usage(cpu_s, wall_s, completed.stdout, completed.stderr)


def instructions(command: Sequence[str | Path], variables: Mapping[str, str]) -> int:
    """Run a command under callgrind, and return the number of its instructions. Further runs take the same number.

    Raises:
        Failed: The command failed, or valgrind is not installed.
    """
    if shutil.which("valgrind") is None:
        raise Failed("instructions were not counted: valgrind is not installed")
    callgrind = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null"]
    errors = run([*callgrind, *command], {**variables, "PYTHONHASHSEED": "0"}).errors
    return int(_COLLECTED.findall(errors)[-1])
