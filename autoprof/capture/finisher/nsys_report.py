"""Move of the report of one window from the folder of `nsys` to its final name.

A separate process of nsys writes one report for each window. With `--capture-range-end=repeat:async`, nsys writes the
report some time after the window was closed. An nsys without this option writes the report when the recorded process
has ended. The report is called `<-o>.<number>.nsys-rep`, or has no number (verl 0.9.1,
utils/profiler/nvtx_profile.py, relocate_results).

This module is part of the finisher process, so it uses only the standard library.
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

# Ending of the unfinished file from which nsys makes a report.
_UNFINISHED = ".qdstrm"
OWN_COMMAND = "the report is where your own nsys command writes it"
_UNCHANGED_S = 2.0
_PAUSE_S = 0.2
_LONG_PAUSE_S = 2.0


def take(job: dict[str, Any]) -> dict[str, Any]:
    """Wait for the report of a window and move it to its final name. Return the fields that this adds to the meta file.

    Raises:
        OSError: nsys wrote no report, or the report can't be moved.
    """
    with open(job["raw"], encoding="utf-8") as file:
        description = json.load(file)
    if not description["report"]:
        return {"reason": job["meta"]["reason"] or OWN_COMMAND}
    path = _wait(description, job["raw"], at_users_cost=not job["python"])
    final_path = job["base"] + NSYS_REPORT
    # Other processes wait for the capture while this file exists. `job.py` removes the file last.
    os.close(files.create(final_path + NAMED))
    _move(path, job["raw"])
    os.replace(job["raw"], final_path)
    return {"bytes": os.path.getsize(final_path)}


def _wait(description: dict[str, Any], raw: str, at_users_cost: bool) -> str:
    """Wait until nsys has finished the report, and return its path.

    The wait ends at the latest `patience_s` after the end of the recorded process.

    Args:
        description: The description of the report, from `NsysTool.export`.
        raw: Path of the file with the description. The file is touched while the report may come soon, because other
            processes wait only for files that change.
        at_users_cost: True if the training process waits for the report. Then the wait takes at most `patience_s`.

    Raises:
        OSError: nsys wrote no report in time.
    """
    patience_s = description["patience_s"]
    soon_until = time.monotonic() + patience_s
    deadline = soon_until if at_users_cost else math.inf
    last_shape, last_change = (0, 0.0), 0.0
    process_ended = False
    while (now := time.monotonic()) < deadline:
        if now < soon_until:
            os.utime(raw)
        path = _complete(description)
        shape = (os.path.getsize(path), os.path.getmtime(path)) if path else (0, 0.0)
        if shape != last_shape:
            last_shape, last_change = shape, now
        elif path and now - last_change >= _UNCHANGED_S:
            return path
        if not process_ended and not os.path.exists(f"/proc/{description['pid']}"):
            process_ended, soon_until = True, now + patience_s
            deadline = min(deadline, soon_until)
        time.sleep(_PAUSE_S if path or now < soon_until else _LONG_PAUSE_S)
    after = "the end of its process" if process_ended else "the window"
    raise OSError(
        f"nsys wrote no report {description['report']}.{description['number']}{NSYS_REPORT} "
        f"within {patience_s:g} s after {after}"
    )


def _complete(description: dict[str, Any]) -> str:
    """Return the path of the report if it exists and nsys has finished it. Otherwise return an empty text."""
    bases = [f"{description['report']}.{description['number']}"]
    if description["number"] == 1:
        bases.append(description["report"])
    for base in bases:
        try:
            if os.path.getsize(base + NSYS_REPORT) and not os.path.exists(base + _UNFINISHED):
                return base + NSYS_REPORT
        except FileNotFoundError:
            continue
    return ""


def _move(path: str, target: str) -> None:
    """Move the content of a report to `target`, and leave an empty file at `path`.

    nsys may choose the number of the next report by the existing files. The empty file keeps the number in use.
    """
    try:
        os.rename(path, target)
    except OSError:  # another file system, or the folder of another user
        shutil.copyfile(path, target)
    with contextlib.suppress(OSError):
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW, 0o600))
