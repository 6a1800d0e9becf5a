"""Move of one window's report from its place under `nsys`. Part of `job.py`, which loads it: stdlib only.

nsys writes a report of its own for each window, in a process of its own: some time after the window was closed, or, one
that does not know `--capture-range-end=repeat:async`, when the process that it records has ended. It is called
`<-o>.<number>.nsys-rep`, or without a number (verl 0.9.1, utils/profiler/nvtx_profile.py, relocate_results).
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

# What nsys makes a report of.
_UNFINISHED = ".qdstrm"
OWN_COMMAND = "the report is where your own nsys command writes it"
_STILL_S = 2.0
_PAUSE_S = 0.2
_LONG_PAUSE_S = 2.0


def take(job: dict[str, Any]) -> dict[str, Any]:
    """Wait for the report of `job["raw"]` and move it to its final name; return its entries of the meta file.

    Raises:
        OSError: There is none, or it can't be moved.
    """
    with open(job["raw"], encoding="utf-8") as file:
        known = json.load(file)
    if not known["report"]:
        return {"reason": job["meta"]["reason"] or OWN_COMMAND}
    path = _wait(known, job["raw"], at_users_cost=not job["python"])
    final = job["base"] + NSYS_REPORT
    # There is a .part until all is there, as in `job.py`.
    os.close(files.create(final + NAMED))
    _move(path, job["raw"])
    os.replace(job["raw"], final)
    return {"bytes": os.path.getsize(final)}


def _wait(known: dict[str, Any], raw: str, at_users_cost: bool) -> str:
    """Return the path of the report, when nsys is through with it.

    It is waited for as long as the process that is recorded runs, and a while longer. `raw` is touched while it may be
    there soon: for what is not touched for long nobody else waits.
    """
    patience_s = known["patience_s"]
    soon_until = time.monotonic() + patience_s
    deadline = soon_until if at_users_cost else math.inf
    seen, since = (0, 0.0), 0.0
    alone = False
    while (now := time.monotonic()) < deadline:
        if now < soon_until:
            os.utime(raw)
        path = _there(known)
        shape = (os.path.getsize(path), os.path.getmtime(path)) if path else (0, 0.0)
        if shape != seen:
            seen, since = shape, now
        elif path and now - since >= _STILL_S:
            return path
        if not alone and not os.path.exists(f"/proc/{known['pid']}"):
            alone, soon_until = True, now + patience_s
            deadline = min(deadline, soon_until)
        time.sleep(_PAUSE_S if path or now < soon_until else _LONG_PAUSE_S)
    after = "the end of its process" if alone else "the window"
    raise OSError(
        f"nsys left no report {known['report']}.{known['number']}{NSYS_REPORT} within {patience_s:g} s after {after}"
    )


def _there(known: dict[str, Any]) -> str:
    """Return the report as far as it is there, and not being made."""
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
    """Move the content of a report to `target`. Its name stays taken by an empty file: nsys may number by what is
    there."""
    try:
        os.rename(path, target)
    except OSError:  # another file system, or a folder of somebody else's
        shutil.copyfile(path, target)
    with contextlib.suppress(OSError):
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW, 0o600))
