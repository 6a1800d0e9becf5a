"""Move of one window's report from the folder of `nsys` to its final name.

nsys writes one report for each window, in a separate process. It does so some time after the window was closed. An nsys
without `--capture-range-end=repeat:async` does so when the recorded process has ended. The report is called
`<-o>.<number>.nsys-rep`, or has no number (verl 0.9.1, utils/profiler/nvtx_profile.py, relocate_results).
Part of the finisher process: standard library only.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import time
from typing import Any

from autoprof.base import files
from autoprof.rundir.file_names import NAMED, NSYS_REPORT

# Ending of the file from which nsys makes a report.
_UNFINISHED = ".qdstrm"
OWN_COMMAND = "the report is where your own nsys command writes it"
_STILL_S = 2.0
_PAUSE_S = 0.2
_LONG_PAUSE_S = 2.0


def take(job: dict[str, Any]) -> dict[str, Any]:
    """Wait for the report of a window and move it to its final name. Return its fields of the meta file.

    Raises:
        OSError: nsys wrote no report, or it can't be moved.
    """
    with open(job["raw"], encoding="utf-8") as file:
        known = json.load(file)
    if not known["report"]:
        return {"reason": job["meta"]["reason"] or OWN_COMMAND}
    path = _wait(known, job["raw"], at_users_cost=not job["python"])
    final = job["base"] + NSYS_REPORT
    # A .part file exists until everything is in place, as in `job.py`.
    os.close(files.create(final + NAMED))
    _move(path, job["raw"])
    os.replace(job["raw"], final)
    return {"bytes": os.path.getsize(final)}


def _wait(known: dict[str, Any], raw: str, at_users_cost: bool) -> str:
    """Wait until nsys has finished the report, and return its path.

    This waits while the recorded process runs, and `patience_s` longer.

    Args:
        known: The description of the report, from `NsysTool.export`.
        raw: The recording. It is touched while the report may come soon, because other processes wait only for files
            that change.
        at_users_cost: True if the training process waits for this, which then takes `patience_s` at most.

    Raises:
        OSError: nsys wrote no report in time.
    """
    patience_s = known["patience_s"]
    soon_until = time.monotonic() + patience_s
    deadline = soon_until if at_users_cost else math.inf
    seen, since = (0, 0.0), 0.0
    process_ended = False
    while (now := time.monotonic()) < deadline:
        if now < soon_until:
            os.utime(raw)
        path = _complete(known)
        shape = (os.path.getsize(path), os.path.getmtime(path)) if path else (0, 0.0)
        if shape != seen:
            seen, since = shape, now
        elif path and now - since >= _STILL_S:
            return path
        if not process_ended and not os.path.exists(f"/proc/{known['pid']}"):
            process_ended, soon_until = True, now + patience_s
            deadline = min(deadline, soon_until)
        time.sleep(_PAUSE_S if path or now < soon_until else _LONG_PAUSE_S)
    after = "the end of its process" if process_ended else "the window"
    raise OSError(
        f"nsys wrote no report {known['report']}.{known['number']}{NSYS_REPORT} within {patience_s:g} s after {after}"
    )


def _complete(known: dict[str, Any]) -> str:
    """Return the path of the report if it exists and nsys is not still making it, else an empty text."""
    bases = [f"{known['report']}.{known['number']}"]
    if known["number"] == 1:
        bases.append(known["report"])
    for base in bases:
        try:
            if os.path.getsize(base + NSYS_REPORT) and not os.path.exists(base + _UNFINISHED):
                return base + NSYS_REPORT
        except FileNotFoundError:
            continue
    return ""


def _move(path: str, target: str) -> None:
    """Move the content of a report to `target`, and leave an empty file.

    The empty file keeps the name in use: nsys may choose numbers by the existing files.
    """
    try:
        os.rename(path, target)
    except OSError:  # another file system, or the folder of another user
        shutil.copyfile(path, target)
    with contextlib.suppress(OSError):
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW, 0o600))
