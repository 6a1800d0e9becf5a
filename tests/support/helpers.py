"""Functions that tests share."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


# Imports of torch in a process of its own that take less long: nothing is looked for garbage, of which the last time is
# at the exit; and without torch's compiler, which its profiler imports when it first records (2.13).
WHOLE_TORCH = "import gc; gc.disable(); import torch; gc.freeze(); gc.enable()"
TORCH = f"{WHOLE_TORCH}; torch._lazy_modules.discard('_inductor')\n"

# The module that reads TOML files.
TOML = "tomllib" if sys.version_info >= (3, 11) else "tomli"

# A folder of packages that go in front of the environment's, in child processes too (test_wrapt_versions.py).
IN_FRONT = "TESTS_PACKAGES_IN_FRONT"


# Ray starts no process before it is needed, for those that it starts early don't fit a run's actors; its workers, which
# it makes the least important of the machine, get as much of it as other tests.
RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_worker_niceness": "0",
}


def clean_environment(**variables: str) -> dict[str, str]:
    """The environment without autoprof's variables and without PYTHONPATH, plus `RAY` and `variables`."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith("AUTOPROF") and name != "PYTHONPATH"
    }
    if IN_FRONT in kept:
        theirs = variables.get("PYTHONPATH")
        variables["PYTHONPATH"] = os.pathsep.join([kept[IN_FRONT], *([theirs] if theirs else [])])
    return kept | RAY | variables


def autoprof(*arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Call the command line in a folder, as a user does."""
    return subprocess.run(
        [sys.executable, "-m", "autoprof", *arguments],
        cwd=cwd,
        env=clean_environment(**variables),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def wait_for(path: Path, timeout_s: float = 60) -> str:
    """The text of a file that some other process gives its name when it is complete."""
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.05)
    return path.read_text()


def wait_for_line(path: Path, timeout_s: float = 60) -> str:
    """The text of a file to which a shell's `>` writes lines: the file is there before the first of them."""
    deadline = time.monotonic() + timeout_s
    while not (path.exists() and (text := path.read_text()).endswith("\n")):
        assert time.monotonic() < deadline, f"{path} never had a line"
        time.sleep(0.05)
    return text


def spans(run: Path) -> list[dict[str, Any]]:
    """Return the spans in the timeline of a run, or in one file of it."""
    files = [run] if run.is_file() else sorted(run.glob("timeline/*.jsonl"))
    lines = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    return [line for line in lines if line["kind"] not in ("process", "begun", "dropped", "exit", "raised", "memory")]


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """No file of this process and its children may grow past `size` bytes, as on a full disk: the write fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
