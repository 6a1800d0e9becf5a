"""Runs commands that start whole trees of processes, and leaves none of them behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

TAG = "TEST_RUN_TAG"
# The terminal's stderr, where pytest's processes had it before they caught what tests print.
terminal = 2


@dataclass(frozen=True)
class Finished:
    """A command that ended by itself: its exit status and what it printed."""

    status: int
    output: str
    left_behind: list[str]


@contextmanager
def told(name: str) -> Iterator[None]:
    """Say on the terminal that a real run begins, and how long it took when it has ended."""
    module = os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[0].rpartition("/")[2].removesuffix(".py")
    begin = time.monotonic()
    _say(f"{module}: {name} begins")
    try:
        yield
    finally:
        _say(f"{module}: {name} took {time.monotonic() - begin:.0f} s")


def _say(line: str) -> None:
    # Between pytest's dots, which leave no line complete.
    os.write(terminal, f"\n{line}\n".encode())


def run(command: Sequence[str], *, cwd: Path, env: dict[str, str], timeout_s: float) -> Finished:
    """Run a command to its end, within `timeout_s`, in a session of its own.

    Every process that it started, found by its session or by a variable in its environment, is ended afterwards.

    Raises:
        AssertionError: It took longer; the message ends with what it printed last.
    """
    tag = uuid.uuid4().hex
    log = cwd / f"output-{tag[:6]}.log"
    # pytest numbers its folders, mostly from 0 to 0.
    with told(cwd.name.removesuffix("0")):
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
            raise AssertionError(f"not through within {timeout_s:g} s:\n{_tail(log)}") from None
        finally:
            left_behind = end_all(tag, process.pid, grace_s=30.0)
            process.wait()
    return Finished(status, log.read_text(errors="replace"), left_behind)


def run_framework(command: Sequence[str], *, cwd: Path, env: dict[str, str], timeout_s: float) -> Finished:
    """`run`, once more in an emptied folder where the framework lost a port that it had found free.

    verl and vLLM look for a free port long before they listen on it, and any socket of the machine may get it meanwhile
    (verl 0.9.1, single_controller/ray/base.py, get_master_addr_port: seen once in some 100 runs).
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
    """End the processes with this tag or of this session, and return the titles of those there after `grace_s`.

    Both are looked at: a process that sets its title overwrites its environment as others see it (vLLM's engine), and
    one that makes a session of its own leaves the first.
    """
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
