"""What tests share that is no fixture."""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


# A folder of packages that go in front of the environment's, in child processes too (test_wrapt_versions.py).
IN_FRONT = "TESTS_PACKAGES_IN_FRONT"


def clean_environment(**variables: str) -> dict[str, str]:
    """The environment without autoprof's variables and without PYTHONPATH, plus `variables`."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith("AUTOPROF") and name != "PYTHONPATH"
    }
    if IN_FRONT in kept:
        theirs = variables.get("PYTHONPATH")
        variables["PYTHONPATH"] = os.pathsep.join([kept[IN_FRONT], *([theirs] if theirs else [])])
    return kept | variables


def wait_for(path: Path, timeout_s: float = 60) -> str:
    """The text of a file that some other process gives its name when it is complete."""
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.05)
    return path.read_text()


def spans(run: Path) -> list[dict[str, Any]]:
    """What the timeline of a run holds, or one file of it, but for the lines that tell of a process."""
    files = [run] if run.is_file() else sorted(run.glob("timeline/*.jsonl"))
    lines = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    return [line for line in lines if line["kind"] != "process"]


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """No file of this process and its children may grow past `size` bytes, as on a full disk: the write fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
