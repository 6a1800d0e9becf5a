"""Runs commands that start whole trees of processes, and leaves none of them behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TAG = "TEST_RUN_TAG"


@dataclass(frozen=True)
class Finished:
    """A command that ended by itself: its exit status and what it printed."""

    status: int
    output: str
    left_behind: list[str]


def run(command: Sequence[str], *, cwd: Path, env: dict[str, str], timeout_s: float) -> Finished:
    """Run a command to its end, within `timeout_s`, in a session of its own.

    Every process that it started, found by a variable in its environment, is ended afterwards.

    Raises:
        AssertionError: It took longer; the message ends with what it printed last.
    """
    tag = uuid.uuid4().hex
    log = cwd / f"output-{tag[:6]}.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            list(command), cwd=cwd, env=env | {TAG: tag}, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        status = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"not through within {timeout_s:g} s:\n{_tail(log)}") from None
    finally:
        left_behind = end_all(tag, grace_s=10.0)
        process.wait()
    return Finished(status, log.read_text(errors="replace"), left_behind)


def end_all(tag: str, grace_s: float) -> list[str]:
    """End the processes with this tag, and return the command lines of those that were there after `grace_s`."""
    deadline = time.monotonic() + grace_s
    while (found := _tagged(tag)) and time.monotonic() < deadline:
        time.sleep(0.1)
    titles = [_title(pid) for pid in found]
    for ending in (signal.SIGTERM, signal.SIGKILL):
        for pid in _tagged(tag):
            try:
                os.kill(pid, ending)
            except ProcessLookupError:
                pass
        deadline = time.monotonic() + 5
        while _tagged(tag) and time.monotonic() < deadline:
            time.sleep(0.05)
    return titles


def _tagged(tag: str) -> list[int]:
    wanted = f"{TAG}={tag}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                environment = Path("/proc", entry, "environ").read_bytes()
                state = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if wanted in environment.split(b"\0") and state != "Z":
                found.append(int(entry))
    return found


def _title(pid: int) -> str:
    try:
        return Path("/proc", str(pid), "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    except OSError:
        return "gone"


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-40:])
