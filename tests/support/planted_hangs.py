"""Runner of small programs with a planted hang or death, and of `autoprof doctor` on their runs."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from tests.support import helpers, judged_runs, processes
from tests.support.launchers import NOT_SET, by_hand

BEGIN = """import os, signal, sys, threading, time
import autoprof
RANK = int(os.environ.get("RANK", 0))
def stuck():
    open(f"stuck{os.getpid()}", "w").close()
def steps(body, count=4, stage="update_actor"):
    for number in range(1, count + 1):
        with autoprof.step(number), autoprof.stage(stage, role="actor"):
            body(number)
"""
DISTRIBUTED = f"""{BEGIN}{helpers.TORCH}
from datetime import timedelta
import torch.distributed as dist
def begin(timeout_s=600):
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
def reduce():
    dist.all_reduce(torch.ones(4))
"""
# Comment on the line at which the planted cause is, and on a second line of interest.
HERE, THERE = "# HERE", "# THERE"
_HUNG = "still running"
# Time between two checks of the watchers.
_LOOK_MS = "200"


class Row(NamedTuple):
    """A program with a planted cause, and what doctor must say about its run.

    Attributes:
        name: The name of the row.
        code: The program. It follows `BEGIN`, or `DISTRIBUTED` if it has several ranks.
        who: The name of the process that causes the hang or death; empty for a run without a problem.
        words: Texts that doctor's first problem must contain. `@HERE` stands for file and line of the mark.
        never: Texts that doctor's first problem must not contain.
        notes: Texts that one of doctor's problems or notes must contain.
        ranks: The number of processes.
        launcher: True to start the ranks by torchrun.
        act: The signals for the stuck run: `TERM`, or `KILL launcher`.
        lib: True for a program that imports a hooked module `small` instead of calling `autoprof.step`.
        wait_s: Seconds from the hang to the call of doctor.
        quick: True to run the row in each test session.
        fails: The reason why the row fails today.
    """

    name: str
    code: str
    who: str = ""
    words: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    ranks: int = 1
    launcher: bool = False
    act: str = ""
    lib: bool = False
    wait_s: float = 3.0
    quick: bool = False
    fails: str = ""


class Outcome(NamedTuple):
    """Ends of the processes with autoprof on and off, doctor's problems and notes, and the texts that are missing."""

    on: list[Any]
    off: list[Any]
    problems: list[str]
    notes: list[str]
    missing: list[str]


def outcome(row: Row, folder: Path) -> Outcome:
    """Run the program of a row with autoprof and without it, ask doctor, and compare."""
    begin = DISTRIBUTED if row.ranks > 1 or "torch" in row.code else BEGIN
    program = begin + row.code
    places = {mark: _place(program, mark) for mark in (HERE, THERE)}
    with _running(row, program, folder / "on", "1") as on, _running(row, program, folder / "off", "0") as off:
        for started in (on, off):
            _wait(row, started, folder / ("on" if started is on else "off"))
        run = folder / "on" / "autoprof_runs" / "latest"
        ends = [[_end(process) for process in started] for started in (on, off)]
        with mock.patch.dict(os.environ, AUTOPROF_LOOK_MS=_LOOK_MS):
            report = judged_runs.asked("doctor", str(run))
    problems, notes = report.get("problems", []), report.get("notes", [])
    first = problems[0] if problems else ""
    expected = [row.who, *(places.get(f"# {word[1:]}", word) for word in row.words)]
    everything = "\n".join([*problems, *notes])
    missing = [text for text in filter(None, expected) if text not in first]
    missing += [f"not {text}" for text in row.never if text in first]
    missing += [text for note in row.notes if (text := places.get(f"# {note[1:]}", note)) not in everything]
    missing += [f"no problem, but {first}"] if not row.who and not row.words and first else []
    return Outcome(*ends, problems, notes, missing)


def _place(program: str, mark: str) -> str:
    lines = [number for number, line in enumerate(program.splitlines(), 1) if line.endswith(mark)]
    return f"train.py:{lines[0]}" if lines else ""


def _end(process: subprocess.Popen[str]) -> Any:
    status = process.poll()
    return _HUNG if status is None else status


def _wait(row: Row, started: list[subprocess.Popen[str]], folder: Path) -> None:
    """Wait until the program is stuck, or has ended. Then send the signals of the row, and wait for the end."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not list(folder.glob("stuck*")):
        if all(process.poll() is not None for process in started):
            return
        time.sleep(0.05)
    marked_s = max((path.stat().st_mtime for path in folder.glob("stuck*")), default=time.time())
    until = time.monotonic() + max(0.0, marked_s + row.wait_s - time.time())
    while time.monotonic() < until and any(process.poll() is None for process in started):
        time.sleep(0.05)
    if not row.act:
        return
    for process in started:
        process.send_signal(getattr(signal, f"SIG{row.act.partition(' ')[0]}"))
    with contextlib.suppress(subprocess.TimeoutExpired):
        for process in started:
            process.wait(timeout=45)


@contextlib.contextmanager
def _running(row: Row, program: str, folder: Path, switch: str) -> Iterator[list[subprocess.Popen[str]]]:
    folder.mkdir(parents=True)
    (folder / "train.py").write_text(program)
    settings = {"AUTOPROF": switch, "AUTOPROF_STEPS": "", "AUTOPROF_WHEN": "hang>1s", "AUTOPROF_LOOK_MS": _LOOK_MS}
    settings |= {
        processes.TAG: uuid.uuid4().hex,
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": str(folder),
        "RAY_TMPDIR": "/tmp",  # the path of a socket has at most 107 characters
    }
    if row.lib:
        place = judged_runs.Place(folder / "place")
        lib = str(place.folder / "lib")
        settings |= {"PYTHONPATH": lib, "AUTOPROF_RECIPES": f"{lib}/small.toml"}
    kept = {name: value for name, value in helpers.clean_environment().items() if name not in NOT_SET}
    command = [sys.executable, "train.py"]
    environments = [kept | settings]
    if row.launcher:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(row.ranks)]
        command = [*torchrun, "train.py"]
    elif row.ranks > 1:
        with socket.create_server(("localhost", 0)) as server:
            port = server.getsockname()[1]
        environments = [kept | settings | by_hand(rank, row.ranks, port) for rank in range(row.ranks)]
    with (folder / "output").open("w") as output:
        started = [
            subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=output, start_new_session=True)
            for environment in environments
        ]
    try:
        yield started  # type: ignore[misc]
    finally:
        _end_all(settings[processes.TAG])
        for process in started:
            process.wait(timeout=60)


def _end_all(tag: str) -> None:
    """End all processes that have the tag in their environment: the ranks of torchrun and Ray begin new sessions."""
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError):
                if f"{processes.TAG}={tag}".encode() in Path("/proc", name, "environ").read_bytes():
                    os.kill(int(name), signal.SIGKILL)


def main() -> None:
    """Run the rows with the given names, or all, and print what came out of each."""
    import shutil
    import tempfile

    from tests.real.hang_table import ROWS

    names = sys.argv[1:]
    for row in ROWS:
        if names and not any(row.name.startswith(name) for name in names):
            continue
        folder = Path(tempfile.mkdtemp(prefix=f"{row.name}-"))
        began = time.monotonic()
        done = outcome(row, folder)
        verdict = "right" if not done.missing else f"MISSING {done.missing}"
        same = "" if done.on == done.off else f"  OFF {done.off}"
        print(f"== {row.name}: {verdict} on {done.on}{same} {time.monotonic() - began:.0f} s {folder}", flush=True)
        for text in done.problems:
            print(f"   - {text}")
        for text in done.notes:
            print(f"     . {text}", flush=True)
        if not done.missing:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
