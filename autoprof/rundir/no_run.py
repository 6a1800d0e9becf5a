"""Description of files and folders that somebody took for a run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from autoprof.base import units
from autoprof.rundir.file_names import RUN, STEP

_MOST_NAMED = 5
_TRACES = (".json", ".json.gz")


def described(path: Path) -> str:
    """Say that a file or a folder is no run, what it is, and what to give instead."""
    for parent in path.absolute().parents:
        if (parent / RUN).is_file():
            step = f" --step {int(number)}" if (number := path.name.removeprefix(STEP)).isdecimal() else ""
            return f"{path} is no run, it is part of one; give {parent}{step}"
    if not path.is_dir():
        return f"{path} is no run, it is a file; a run is a folder with a {RUN}"
    return f"{path} is no run: it has no {RUN}; {contents(path)}"


def contents(path: Path) -> str:
    """Say what a folder holds: runs, or else files by their kinds."""
    try:
        names = sorted(each for each in path.iterdir() if each.name != ".gitignore")
        for folder in (path, *(each for each in names if each.is_dir() and not each.is_symlink())):
            if found := [each.parent.name for each in sorted(folder.glob(f"*/{RUN}")) if not each.parent.is_symlink()]:
                more = "..., " if len(found) > _MOST_NAMED else ""
                named = f"{more}{', '.join(found[-_MOST_NAMED:])}"
                where = "it holds" if folder == path else f"{folder.name} in it holds"
                return f"{where} {units.count(len(found), 'run')}: {named}; use --dir {folder}"
    except OSError as error:
        return f"it can't be read: {error.strerror}"
    kinds = Counter("folder" if each.is_dir() else _kind(each) for each in names)
    if not kinds:
        return "it is empty"
    held = f"it has {', '.join(units.count(number, kind) for kind, number in kinds.most_common(_MOST_NAMED))}"
    traces = any(each.name.endswith(_TRACES) for each in names if each.is_file())
    return f"{held}; autoprof merge {path} takes traces without a run" if traces else held


def _kind(path: Path) -> str:
    ending = "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix
    return f"{ending[1:].upper()} file" if ending else "file"
