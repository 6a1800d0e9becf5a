"""Takes the report of one window from where `nsys` writes it. Part of `_finish.py`, which loads it: stdlib only.

nsys writes a report of its own for each window that is closed, in a process of its own, and some time after the window:
`<-o>.<number>.nsys-rep`, or without a number (verl 0.9.1, utils/profiler/nvtx_profile.py, relocate_results).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from typing import Any

ENDING = ".nsys-rep"
# What nsys makes a report of.
_UNFINISHED = ".qdstrm"
OWN_COMMAND = "the report is where the user's own nsys command has it written"
_LONGEST_S = 1800.0
_STILL_S = 2.0
_PAUSE_S = 0.2


def take(job: dict[str, Any]) -> dict[str, Any]:
    """Wait for the report that `job["raw"]` tells of and move it to its final name; returns what the meta file says.

    Raises:
        OSError: There is none, or it can't be moved.
    """
    with open(job["raw"], encoding="utf-8") as file:
        known = json.load(file)
    if not known["report"]:
        return {"reason": job["meta"]["reason"] or OWN_COMMAND}
    # Without another process the wait is at the user's cost.
    path = _wait(known, job["raw"], _LONGEST_S if job["python"] else known["patience_s"])
    final = job["base"] + ENDING
    _move(path, job["raw"])
    os.replace(job["raw"], final)
    return {"bytes": os.path.getsize(final)}


def _wait(known: dict[str, Any], raw: str, longest_s: float) -> str:
    """The path of the report, when nsys is through with it.

    `raw` is touched meanwhile, since what is not for long is taken for left behind.
    """
    began = time.monotonic()
    deadline = began + longest_s
    seen, since = (0, 0.0), began
    alone = False
    while time.monotonic() < deadline:
        os.utime(raw)
        path = _there(known)
        now = (os.path.getsize(path), os.path.getmtime(path)) if path else (0, 0.0)
        if now != seen:
            seen, since = now, time.monotonic()
        elif path and time.monotonic() - since >= _STILL_S:
            return path
        if not alone and not os.path.exists(f"/proc/{known['pid']}"):
            # nsys has ended with it, or will when this is written.
            alone, deadline = True, min(deadline, time.monotonic() + known["patience_s"])
        time.sleep(_PAUSE_S)
    raise OSError(f"nsys left no report {known['report']}.{known['number']}{ENDING} within {deadline - began:.0f} s")


def _there(known: dict[str, Any]) -> str:
    """The report as far as it is there, and not being made."""
    bases = [f"{known['report']}.{known['number']}"]
    if known["number"] == 1:
        bases.append(known["report"])
    for base in bases:
        try:
            if os.path.getsize(base + ENDING) and not os.path.exists(base + _UNFINISHED):
                return base + ENDING
        except FileNotFoundError:
            continue
    return ""


def _move(path: str, target: str) -> None:
    """Move the content of a report to `target`. Its name stays taken by an empty file: nsys may number by what is
    there."""
    try:
        os.rename(path, target)
    except OSError:  # another file system, or a folder of somebody else's
        shutil.copyfile(path, target)
    with contextlib.suppress(OSError):
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600))
