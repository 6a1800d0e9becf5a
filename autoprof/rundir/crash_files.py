"""Reader of the stacks of processes that crashed: `crashes/<host>-<pid>.txt`, written by Python's `faulthandler`."""

from __future__ import annotations

import re
from pathlib import Path

from msgspec import Struct

from autoprof.base import files, interrupts
from autoprof.base.originals import io, os
from autoprof.base.redact import hidden
from autoprof.rundir.layout import CRASHES, RunDir
from autoprof.rundir.records import Frame

# The words for the signals (`faulthandler_handlers` in CPython's Modules/faulthandler.c).
_SIGNALS = {
    "Segmentation fault": "SIGSEGV",
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Illegal instruction": "SIGILL",
    "Floating-point exception": "SIGFPE",
    "Floating point exception": "SIGFPE",
}
_FATAL = re.compile(r"^Fatal Python error: ([^\n]{1,100})$", re.MULTILINE)
# The library tvm-ffi, which vLLM's xgrammar brings, puts its own handler in place of Python's as it is loaded. It tells
# functions in C alone (tvm-ffi 0.1.15, src/ffi/backtrace.cc).
_TVM = "\n!!!!!!! Segfault encountered !!!!!!!\n"
_FRAME = re.compile(r'^  File "([^"\n]{1,400})", line (\d{1,9}) in ([^\n]{1,200})$', re.MULTILINE)
_THREAD = re.compile(r"^(?:Current thread 0x|Thread 0x|Stack \()[^\n]*$", re.MULTILINE)
# autoprof's modules that run in a program, on any host.
_OWN = re.compile(r"[/\\]autoprof[/\\]((_boot|base|behaviours|capture|hooks|run|windows)[/\\].*|__init__|agent)\.py$")
_MOST_BYTES = 1 << 20
_TAIL_BYTES = 1 << 17


class Crash(Struct, frozen=True, kw_only=True):
    """One process that crashed."""

    host: str
    pid: int
    signal: str
    frames: list[Frame]
    ns: int
    file: str


def read(run: Path) -> list[Crash]:
    """Return the crashes of a run. Files that are empty or can't be read are left out."""
    found = []
    for path in sorted(RunDir(run).path.glob(f"{CRASHES}/*.txt")):
        try:
            ns = path.lstat().st_mtime_ns
            text = files.read(path, _MOST_BYTES).decode(errors="replace")
        except OSError as error:
            interrupts.pass_on(error)
            continue
        host, _, pid = path.stem.rpartition("-")
        if text.strip() and pid.isdecimal():
            signal, frames = parsed(text)
            found.append(
                Crash(host=host, pid=int(pid), signal=signal, frames=frames, ns=ns, file=f"{CRASHES}/{path.name}")
            )
    return found


def in_log(path: str) -> tuple[str, list[Frame]] | None:
    """Return the signal and the stack at the end of a process's stderr, where it is a file.

    Ray enables `faulthandler` in its workers itself: their stacks are in their logs.
    """
    try:
        with io.open(files.opened(path), "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError as error:
        interrupts.pass_on(error)
        return None
    begins = [found.start() for found in _FATAL.finditer(text)]
    if begins:
        return parsed(text[begins[-1] :])
    return ("SIGSEGV", []) if _TVM in text else None


def parsed(text: str) -> tuple[str, list[Frame]]:
    """Return the signal, and the stack of the thread that crashed, or of the main thread where that runs no Python."""
    fatal = _FATAL.search(text)
    said = fatal[1].strip() if fatal else ""
    stacks = [_frames(part) for part in _THREAD.split(text)[1:]]
    # The thread that crashed comes first or is missing, the main thread is the oldest and comes last.
    current = next(
        (stack for stack, mark in zip(stacks, _THREAD.findall(text), strict=True) if not mark.startswith("Thread")),
        None,
    )
    return _SIGNALS.get(said, hidden(said)), current or (stacks[-1] if stacks else [])


def _frames(text: str) -> list[Frame]:
    """Return a stack without autoprof's functions, if it has others. The innermost function is the last."""
    found = [Frame(function, file, int(line)) for file, line, function in _FRAME.findall(text)]
    of_program = [frame for frame in found if not _OWN.search(frame.file)]
    return (of_program or found)[::-1]
