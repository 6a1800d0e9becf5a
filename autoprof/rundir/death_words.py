"""Deaths of processes in words, the same in all commands."""

from __future__ import annotations

import re
from collections.abc import Sequence

from autoprof.base import units
from autoprof.base.originals import os, time
from autoprof.rundir.deaths import CRASH, EXCEPTION, EXIT, KERNEL, KILLED, NODE, RAY
from autoprof.rundir.records import Death, Frame, Raised

# Code of libraries, which the user's own has called.
_LIBRARY = re.compile(r"[/\\](site-packages|dist-packages|lib[/\\]python3[^/\\]*)[/\\]|^<|^$")
_MOST_MESSAGE, _MOST_OTHERS, _MOST_FRAMES = 200, 5, 8


def text(death: Death, hosts: int = 1) -> str:
    """Return what happened to a process in one sentence.

    Args:
        death: The process.
        hosts: On how many hosts the run was.
    """
    return f"{'in an earlier attempt, ' if death.earlier else ''}{_who(death, hosts)} {_what(death)}"


def evidence(deaths: Sequence[Death], hosts: int = 1) -> list[str]:
    """Return the details of the first of several deaths, and the others."""
    first, *others = deaths
    lines = []
    if first.file:
        lines.append(f"process {first.pid} on {first.host}: {first.file}")
    if first.last_ns:
        seen = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(first.last_ns / 1e9))
        began = f", where it had been for {units.seconds((first.last_ns - first.since_ns) / 1e9)}" if _in(first) else ""
        lines.append(f"last sign of life: {seen}{began}")
    if first.resident_bytes:
        lines.append(f"its memory when it was last looked at: {units.size(first.resident_bytes)}")
    frames = first.exception.frames if first.exception is not None and first.how != CRASH else first.frames
    lines += [f"at {frame(each, whole=True)}" for each in reversed(frames[-_MOST_FRAMES:])]
    if first.exception is not None and first.exception.cause:
        lines.append(f"because of {first.exception.cause}")
    lines += [f"{'' if other.earlier else 'then: '}{text(other, hosts)}" for other in others[:_MOST_OTHERS]]
    rest = len(others) - _MOST_OTHERS
    return [*lines, *([f"and {rest} more"] if rest > 0 else [])]


def exception(raised: Raised) -> str:
    """Return an exception in words: `ValueError: no score in reward.py:44 fetch_score`."""
    shown = _shown(raised.frames)
    at = f" in {frame(shown)}" if shown else ""
    first = raised.message.partition("\n")[0]
    said = first if len(first) <= _MOST_MESSAGE else f"{first[:_MOST_MESSAGE]}..."
    return f"{raised.type}{f': {said}' if said else ''}{at}"


def frame(of: Frame, whole: bool = False) -> str:
    """Return a function of a stack in words: `reward.py:44 fetch_score`, or with the whole path of its file."""
    return f"{of.file if whole else os.path.basename(of.file)}:{of.line} {of.function}"


def _in(death: Death) -> bool:
    return 0 < death.since_ns < death.last_ns - 1_000_000_000


def _who(death: Death, hosts: int) -> str:
    on = f" on {death.host}" if hosts > 1 and death.host else ""
    if death.role and death.rank is not None and death.role != "trainer":
        return f"{death.role} rank {death.rank}{on}"
    if death.role == "trainer":
        return f"the trainer, rank {death.rank},{on}" if death.rank else f"the trainer{on}"
    if death.rank is not None:
        return f"rank {death.rank}{on}"
    if death.started:
        return f"the process that started the run{on}"
    return f"process {death.pid}{on}"


def _what(death: Death) -> str:
    where = _where(death)
    place = f" {where}" if where else ""
    if death.how == CRASH:
        shown = _shown(death.frames)
        return f"{_how(death)}{place}{f': {frame(shown)}' if shown else ''}"
    if death.how == EXCEPTION and death.exception is not None:
        return f"ended by {exception(death.exception)}{f',{place}' if place else ''}"
    if death.how == EXIT and death.exception is not None and (shown := _shown(death.exception.frames)):
        return f"{_how(death)} in {frame(shown)}{f',{place}' if place else ''}"
    if not death.killer and not death.signal and death.how != EXIT:
        # What `os.exec` starts may not know autoprof. It is no way to leave a step.
        or_exec = " or os.exec" if death.started and not place else ""
        return f"is gone{place} without a word: it was killed by a signal, or left by os._exit{or_exec}"
    return f"{_how(death)}{place}"


def _how(death: Death) -> str:
    if death.how == CRASH:
        return f"crashed ({death.signal})" if death.signal else "crashed"
    if death.how == EXCEPTION and death.exception is not None:
        return f"ended by {death.exception.type}"
    if death.how == EXIT:
        return f"exited with status {death.status}"
    if death.killer in (KERNEL, RAY):
        by = "the kernel" if death.killer == KERNEL else "Ray"
        of = f" ({units.size(death.used_bytes)} of {units.size(death.limit_bytes)})" if death.limit_bytes else ""
        return f"was killed by {by} for memory{of}"
    if death.killer == NODE:
        return "was lost with its node"
    if death.how == KILLED:
        return f"was killed by {death.signal}"
    return "is gone"


def _where(death: Death) -> str:
    if death.after:
        return f"after {death.after} of step {death.step}" if death.step is not None else f"after {death.after}"
    if death.step is None:
        return f"in {death.stage}" if death.stage else ""
    return f"in {death.stage} of step {death.step}" if death.stage else f"in step {death.step}"


def _shown(frames: Sequence[Frame]) -> Frame | None:
    """Return the innermost function of the user's own code; of a library's where there is no other."""
    own = [frame for frame in frames if not _LIBRARY.search(frame.file)]
    return own[-1] if own else frames[-1] if frames else None
