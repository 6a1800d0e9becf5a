"""Runner of commands that start trees of processes; it ends all of these processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TAG = "TEST_RUN_TAG"
# Descriptor of the terminal's stderr, from before pytest captured the output of tests.
terminal = 2


@dataclass(frozen=True)
class Finished:
    """Exit status and output of a command, and the titles of its processes that were still running afterwards."""

    status: int
    output: str
    left_behind: list[str]

    @property
    def result(self) -> Any:
        """Content of the only line `RESULT ...`, which is JSON."""
        (line,) = re.findall(r"^RESULT (.*)$", self.output, re.MULTILINE)
        return json.loads(line)


@contextmanager
def progress(name: str) -> Iterator[None]:
    """Print on the terminal that a real run begins, and its duration at the end."""
    module = os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[0].rpartition("/")[2].removesuffix(".py")
    begin = time.monotonic()
    _say(f"{module}: {name} begins")
    try:
        yield
    finally:
        _say(f"{module}: {name} took {time.monotonic() - begin:.0f} s")


def _say(line: str) -> None:
    # Start on a new line: pytest prints dots without a line break.
    os.write(terminal, f"\n{line}\n".encode())


def run(command: Sequence[str], *, cwd: Path, env: dict[str, str], timeout_s: float) -> Finished:
    """Run a command in its own session until it ends.

    Afterwards all processes that it started are ended; they are found by session or by a variable in their environment.

    Raises:
        AssertionError: The command took longer than `timeout_s`; the message ends with its last lines of output.
    """
    tag = uuid.uuid4().hex
    log = cwd / f"output-{tag[:6]}.log"
    # pytest appends a number to the names of its folders, mostly 0.
    with progress(cwd.name.removesuffix("0")):
        with log.open("w") as file:
            process = subprocess.Popen(
                list(command),
                cwd=cwd,
                env=env | {TAG: tag},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the command did not end within {timeout_s:g} s:\n{_tail(log)}") from None
        finally:
            left_behind = end_all(tag, process.pid, grace_s=30.0)
            process.wait()
    return Finished(status, log.read_text(errors="replace"), left_behind)


def run_framework(command: Sequence[str], *, cwd: Path, env: dict[str, str], timeout_s: float) -> Finished:
    """Call `run`, and once again in the emptied folder if another process took the framework's port.

    verl and vLLM choose a free port long before they listen on it, so any socket of the machine can get it meanwhile
    (verl 0.9.1, single_controller/ray/base.py, get_master_addr_port: seen about once in 100 runs).
    """
    before = set(cwd.rglob("*"))
    finished = run(command, cwd=cwd, env=env, timeout_s=timeout_s)
    if finished.status and "EADDRINUSE" in finished.output:
        for path in sorted(set(cwd.rglob("*")) - before):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        finished = run(command, cwd=cwd, env=env, timeout_s=timeout_s)
    return finished


def end_all(tag: str, session: int, grace_s: float) -> list[str]:
    """End all processes that have this tag or belong to this session.

    Both are checked: a process that sets its title overwrites the environment that /proc shows (vLLM's engine), and a
    process that starts its own session leaves the first one.

    Args:
        tag: Value of the variable `TAG` in the environment of the processes.
        session: Id of the session, above 0. Processes of the system have session 0.
        grace_s: Seconds to wait for the processes to end before they are ended.

    Returns:
        The titles of the processes that still ran after `grace_s`.

    Raises:
        ValueError: The session is 0 or less.
    """
    if session <= 0:
        raise ValueError(f"session {session} is not the session of a command: it must be above 0")
    deadline = time.monotonic() + grace_s
    while (found := _running(tag, session)) and time.monotonic() < deadline:
        time.sleep(0.1)
    titles = [_title(pid) for pid in found]
    for ending in (signal.SIGTERM, signal.SIGKILL):
        for pid in _running(tag, session):
            try:
                os.kill(pid, ending)
            except ProcessLookupError:
                pass
        deadline = time.monotonic() + 5
        while _running(tag, session) and time.monotonic() < deadline:
            time.sleep(0.05)
    return titles


def _running(tag: str, session: int) -> list[int]:
    wanted = f"{TAG}={tag}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                environment = Path("/proc", entry, "environ").read_bytes()
                state, _, _, its_session = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()[:4]
            except OSError:
                continue
            ours = int(its_session) == session or wanted in environment.split(b"\0")
            if ours and state != "Z":
                found.append(int(entry))
    return found


def _title(pid: int) -> str:
    try:
        return Path("/proc", str(pid), "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    except OSError:
        return "gone"


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-40:])
