"""Functions and constants that many tests share."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from autoprof.rundir import processes

ROOT = Path(__file__).resolve().parents[2]
# Types of the fixtures `python` and `autoprof`.
Python = Callable[..., "subprocess.CompletedProcess[str]"]
Autoprof = Callable[..., "subprocess.CompletedProcess[str]"]

# Faster import of torch in a child process, without garbage collection during the import and of its objects at exit.
WHOLE_TORCH = "import gc; gc.disable(); import torch; gc.freeze(); gc.enable()"
# The same, without torch's compiler, which its profiler would import at the first recording (torch 2.13).
TORCH = f"{WHOLE_TORCH}; torch._lazy_modules.discard('_inductor')\n"

# Name of the module that reads TOML files.
TOML = "tomllib" if sys.version_info >= (3, 11) else "tomli"

# Variable with a folder of packages that precede the environment's, in child processes too (test_wrapt_versions.py).
IN_FRONT = "TESTS_PACKAGES_IN_FRONT"


# Ray starts no worker in advance, because a run's actors can't use such workers. Its workers get the same priority as
# other tests; by default Ray gives them the lowest.
RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_worker_niceness": "0",
}


def clean_environment(**variables: str) -> dict[str, str]:
    """Return the environment without autoprof's variables and PYTHONPATH, plus `RAY` and `variables`.

    A run logs no line at its end, unless the test sets `AUTOPROF_LOG=notice`.
    """
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith("AUTOPROF") and name != "PYTHONPATH"
    }
    if IN_FRONT in kept:
        theirs = variables.get("PYTHONPATH")
        variables["PYTHONPATH"] = os.pathsep.join([kept[IN_FRONT], *([theirs] if theirs else [])])
    return kept | RAY | ({"AUTOPROF_LOG": "warning"} if "AUTOPROF" in variables else {}) | variables


def run(
    command: Sequence[str], *, cwd: Path | None = None, timeout_s: float = 300, check: bool = False, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command in the clean environment, and return its status and output."""
    env = clean_environment(**variables)
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout_s, check=check)


def started(command: Sequence[str], *, cwd: Path | None = None, **variables: str) -> subprocess.Popen[str]:
    """Start a command in the clean environment, with pipes as its standard streams."""
    pipe, env = subprocess.PIPE, clean_environment(**variables)
    return subprocess.Popen(command, cwd=cwd, env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def autoprof(*arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run autoprof's command line in the folder `cwd`, as a user does."""
    return run([sys.executable, "-m", "autoprof", *arguments], cwd=cwd, **variables)


def problems(run: Path) -> list[str]:
    """Return the problems of a run that `autoprof doctor` reports."""
    return json.loads(autoprof("doctor", str(run), "--json", cwd=run).stdout)["problems"]


def in_thread(work: Callable[..., object], *arguments: object) -> None:
    """Call a function in another thread, and wait for its end."""
    thread = threading.Thread(target=work, args=arguments)
    thread.start()
    thread.join()


def wait_for(path: Path, timeout_s: float = 60) -> str:
    """Wait for a file that another process renames into place once complete, and return its text."""
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} was not written within {timeout_s:g} s"
        time.sleep(0.05)
    return path.read_text()


def wait_for_line(path: Path, timeout_s: float = 60) -> str:
    """Wait for a complete line in a file that a shell's `>` writes, and return its text.

    The shell creates the file before the first line.
    """
    deadline = time.monotonic() + timeout_s
    while not (path.exists() and (text := path.read_text()).endswith("\n")):
        assert time.monotonic() < deadline, f"{path} had no complete line within {timeout_s:g} s"
        time.sleep(0.05)
    return text


# Kinds of lines of a timeline that are not ended spans.
OTHER_KINDS = ("process", "hook", "error", "begun", "dropped", "exit", "raised", "memory", "stacks")


def spans(run: Path) -> list[dict[str, Any]]:
    """Return the spans in the timeline of a run, or in one timeline file."""
    files = [run] if run.is_file() else sorted(run.glob("journal/*.jsonl"))
    lines = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    return [line for line in lines if line["kind"] not in OTHER_KINDS]


def processes_of(run: Path) -> list[dict[str, Any]]:
    """Return the processes of a run with their hooks and errors, first the process that started the run."""
    path = run / "run.json"
    started = json.loads(path.read_text()) if path.exists() else {}
    states = sorted(
        processes.read(run), key=lambda state: (state.host, state.pid) != (started.get("host"), started.get("pid"))
    )
    return [
        {
            "host": state.host,
            "pid": state.pid,
            "parent": state.parent,
            "process": state.process,
            "node": state.node,
            "versions": state.versions,
            "hooks": {key: _without(line, "hook") for key, line in state.hooks.items()},
            "errors": {where: _without(line, "where") for where, line in state.errors.items()},
        }
        for state in states
    ]


def assert_no_failure(run: Path) -> None:
    """Assert that a run has no errors of autoprof, no failed hooks, and no incomplete files."""
    for process in processes_of(run):
        assert process["errors"] == {}
        assert [key for key, hook in process["hooks"].items() if hook["state"] == "failed"] == []
    assert list(run.rglob("*.part")) == []


def _without(line: msgspec.Struct, name: str) -> dict[str, Any]:
    return {key: value for key, value in msgspec.structs.asdict(line).items() if key != name}


def process_lines(
    host: str = "h",
    pid: int = 1,
    hooks: Mapping[str, Mapping[str, Any]] | None = None,
    errors: Mapping[str, Mapping[str, Any]] | None = None,
    **fields: Any,
) -> str:
    """Return the first lines of a hand-made timeline file: the process, its hooks and its errors."""
    clock = {"unix_ns": 1, "monotonic_ns": 1}
    made = [
        {"kind": "process", "host": host, "pid": pid, "clock": clock, "version": "0", **fields},
        *({"kind": "hook", "hook": key, **hook} for key, hook in (hooks or {}).items()),
        *({"kind": "error", "where": where, **error} for where, error in (errors or {}).items()),
    ]
    return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in made)


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """Let writes of this process and its children fail past `size` bytes of a file, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
