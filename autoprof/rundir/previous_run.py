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

# A part written within this time may still be growing: a process can outlive its run.
_FRESH_S = 10.0
_MAX_NAMED = 3


def cut_off(latest: Path) -> str:
    """Return the warning about the run that `latest` points to, or an empty text.

    Only `run.json` is read, so that the next run starts as fast after a large run as after a small one.
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
        problem = f"its process {info.pid} on {info.host} was killed, crashed, or ended by os._exit or os.exec"
    else:
        problem = f"captures were cut off: {info.cut_off}"
    return f"the previous run, {run}: {problem}; see autoprof doctor {run}"


def note(run: RunDir) -> dict[str, str]:
    """Return the field `cut_off` of `run.json` at the end of a run; the next run reads it."""
    lost = unfinished(run)
    more = f" and {len(lost) - _MAX_NAMED} more" if len(lost) > _MAX_NAMED else ""
    return {"cut_off": f"{', '.join(lost[:_MAX_NAMED])}{more}"} if lost else {}


def unfinished(run: RunDir) -> list[str]:
    """Return the captures of a run that have no meta file and that no process is writing any more."""
    captures = []
    for _, folder in run.steps():
        names: list[str] = []
        with interrupts.suppress(OSError):
            names = sorted(os.listdir(folder))
        present = set(names)
        for name in names:
            base = name.removesuffix(TAKEN)
            if base != name and f"{base}{META}" not in present and not any(map(_is_fresh, _parts(folder, names, base))):
                captures.append(f"{folder.name}/{base}")
    return captures


def _parts(folder: Path, names: list[str], base: str) -> Iterator[Path]:
    """Yield the unfinished files of the capture `base`. `names` are the sorted names in its folder."""
    for index in range(bisect.bisect_left(names, f"{base}."), len(names)):
        if not names[index].startswith(f"{base}."):
            return
        if names[index].endswith(PART):
            yield folder / names[index]


def _is_fresh(part: Path) -> bool:
    try:
        return not part.name.endswith(TAKEN) and abs(time.time() - part.lstat().st_mtime) < _FRESH_S
    except OSError as error:  # the file was renamed meanwhile
        interrupts.pass_on(error)
        return True


def attempts(info: RunFile, run: Path) -> list[Attempt]:
    """Return the attempts at a run that is about to be resumed, oldest first; the last is the one in `info`."""
    state = runs.state(info, run)
    last = Attempt(host=info.host, pid=info.pid, started=info.started, ended=info.ended, state=state)
    return [*info.earlier, last]
