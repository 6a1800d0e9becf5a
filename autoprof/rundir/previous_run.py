"""Warning of a previous run that was killed, or whose captures were cut off."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from pathlib import Path

from autoprof.base import interrupts
from autoprof.base.originals import os, time
from autoprof.rundir import decoder, runs
from autoprof.rundir.file_names import META, PART, TAKEN
from autoprof.rundir.layout import RunDir
from autoprof.rundir.records import Attempt, RunFile
from autoprof.rundir.runs import UNFINISHED

# What was written so lately is still being written, by a process that outlives the run.
_FRESH_S = 10.0
_NAMED = 3


def cut_off(latest: Path) -> str:
    """Return what there is to say of the run that `latest` leads to, or an empty text.

    Only its `run.json` is read: the start of a run must not take longer after one that left much.
    """
    fields = decoder.fields(RunDir(latest).run_json, RunFile)
    info = decoder.record(fields, RunFile)
    state = runs.state(info, latest)
    if not fields or state == "running":
        return ""
    if state != UNFINISHED and not info.cut_off:
        return ""
    run = info.id or latest.resolve().name
    if state == UNFINISHED:
        said = f"its process {info.pid} on {info.host} is gone: it was killed, crashed, or left by os._exit or os.exec"
    else:
        said = f"captures were cut off: {info.cut_off}"
    return f"the previous run, {run}: {said}; see autoprof doctor {run}"


def note(run: RunDir) -> dict[str, str]:
    """Return what `run.json` says at the end of a run for `cut_off` of the next."""
    lost = unfinished(run)
    more = f" and {len(lost) - _NAMED} more" if len(lost) > _NAMED else ""
    return {"cut_off": f"{', '.join(lost[:_NAMED])}{more}"} if lost else {}


def unfinished(run: RunDir) -> list[str]:
    """Return the captures of a run that have no meta file and that nobody is writing any more."""
    found = []
    for _, folder in run.steps():
        names: list[str] = []
        with interrupts.suppress(OSError):
            names = sorted(os.listdir(folder))
        known = set(names)
        for name in names:
            base = name.removesuffix(TAKEN)
            if base != name and f"{base}{META}" not in known and not any(map(_fresh, _parts(folder, names, base))):
                found.append(f"{folder.name}/{base}")
    return found


def _parts(folder: Path, names: list[str], base: str) -> Iterator[Path]:
    """Yield the parts of a capture, of names in order."""
    for place in range(bisect.bisect_left(names, f"{base}."), len(names)):
        if not names[place].startswith(f"{base}."):
            return
        if names[place].endswith(PART):
            yield folder / names[place]


def _fresh(part: Path) -> bool:
    try:
        return not part.name.endswith(TAKEN) and abs(time.time() - part.lstat().st_mtime) < _FRESH_S
    except OSError as error:  # it has its final name now
        interrupts.pass_on(error)
        return True


def attempts(info: RunFile, run: Path) -> list[Attempt]:
    """Return the attempts at a run that there were before it is resumed, this one among them, oldest first."""
    state = runs.state(info, run)
    last = Attempt(host=info.host, pid=info.pid, started=info.started, ended=info.ended, state=state)
    return [*info.earlier, last]
