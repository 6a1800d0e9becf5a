"""Paths of files from other nodes: safe ones, those that belong together, and names where two nodes' files clash."""

from __future__ import annotations

from autoprof.base.originals import os
from autoprof.rundir import file_names
from autoprof.rundir.file_names import JSON, LINES, META, NSYS_REPORT, PART, SNAPSHOT, TRACE

# What stands after the name of a capture.
_ENDINGS = (TRACE, META, SNAPSHOT, NSYS_REPORT, LINES, JSON)
_DEEPEST = 16
# Less than file systems take: parts of files have longer names.
_LONGEST = 220


def safe(path: object) -> bool:
    """Return whether a path from another node leads into the run directory, and to no file of collect's own."""
    if not isinstance(path, str) or "\0" in path:
        return False
    parts = path.split("/")
    names = all(part not in ("", ".", "..") and len(os.fsencode(part)) <= _LONGEST for part in parts)
    return names and len(parts) <= _DEEPEST and not parts[0].startswith(".") and not path.endswith(PART)


def group(path: str) -> str:
    """Return what a file belongs to: the files of a capture have one name and several endings."""
    folder, _, name = path.rpartition("/")
    parts = path.split("/")
    for place, part in enumerate(parts[:-1]):
        if found := file_names.FOLDER.search(part):
            return "/".join([*parts[:place], part.removesuffix(found.group())])
    for ending in _ENDINGS:
        if name.endswith(ending):
            return "/".join(filter(None, [folder, name.removesuffix(ending)]))
    return path


def of_node(path: str, node: str) -> str:
    """Return what a file is called that another of the same name is there of already."""
    belongs = group(path)
    return f"{belongs}.node-{node[:12]}{path.removeprefix(belongs)}"
