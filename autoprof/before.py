"""What became of the run before this one, of which nobody was told: it was killed, or captures of it were."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from autoprof import interrupts, listing
from autoprof.rundir import META, TAKEN, RunDir

# What was written so lately is still being written, by a process that outlives the run.
_FRESH_S = 10.0
_NAMED = 3


def cut_off(latest: Path) -> str:
    """What there is to say of the run that `latest` leads to, or an empty text. Only names and `run.json` are read."""
    info = listing.load_json(latest / "run.json")
    state = listing.state(info)
    if not info or state == "running":
        return ""
    lost = unfinished(RunDir(latest))
    if state == "ended" and not lost:
        return ""
    run = str(info.get("id", latest.resolve().name))
    said = [] if state == "ended" else [f"its process {info.get('pid')} on {info.get('host')} ended without a word"]
    if lost:
        more = f" and {len(lost) - _NAMED} more" if len(lost) > _NAMED else ""
        said.append(f"captures were cut off: {', '.join(lost[:_NAMED])}{more}")
    return f"the run before this one, {run}: {'; '.join(said)}; autoprof doctor {run} says more"


def unfinished(run: RunDir) -> list[str]:
    """The captures of a run that have no meta file and that nobody is writing any more."""
    found = []
    for _, folder in run.steps():
        names: set[str] = set()
        with interrupts.suppress(OSError):
            names = set(os.listdir(folder))
        for name in sorted(names):
            base = name.removesuffix(TAKEN)
            parts = [each for each in names if each.startswith(f"{base}.") and each.endswith(".part")]
            if (
                base != name
                and f"{base}{META}" not in names
                and not any(map(_fresh, (folder / each for each in parts)))
            ):
                found.append(f"{folder.name}/{base}")
    return found


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
