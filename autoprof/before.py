"""What became of the run before this one, of which nobody was told: it was killed, or captures of it were."""

from __future__ import annotations

import bisect
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autoprof import interrupts, listing
from autoprof.documents import RunDocument
from autoprof.rundir import META, PART, TAKEN, RunDir

# What was written so lately is still being written, by a process that outlives the run.
_FRESH_S = 10.0
_NAMED = 3
_CUT_OFF = "cut_off"


def cut_off(latest: Path) -> str:
    """Return what there is to say of the run that `latest` leads to, or an empty text.

    Only its `run.json` is read: the start of a run must not take longer after one that left much.
    """
    info = listing.load_json(latest / "run.json", RunDocument)
    state = listing.state(info)
    if not info or state == "running":
        return ""
    lost = info.get(_CUT_OFF)
    if state == "ended" and not lost:
        return ""
    run = str(info.get("id", latest.resolve().name))
    if state != "ended":
        said = f"its process {info.get('pid')} on {info.get('host')} ended without a word"
    else:
        said = f"captures were cut off: {lost}"
    return f"the run before this one, {run}: {said}; autoprof doctor {run} says more"


def note(run: RunDir) -> dict[str, str]:
    """Return what `run.json` says at the end of a run for `cut_off` of the next."""
    lost = unfinished(run)
    more = f" and {len(lost) - _NAMED} more" if len(lost) > _NAMED else ""
    return {_CUT_OFF: f"{', '.join(lost[:_NAMED])}{more}"} if lost else {}


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


def attempts(info: dict[str, Any]) -> list[dict[str, Any]]:
    """The attempts at a run that there were before it is resumed, this one among them, oldest first."""
    last = {name: info.get(name) for name in ("host", "pid", "started", "ended") if name in info}
    return [*info.get("earlier", []), last | {"state": listing.state(info)}]
