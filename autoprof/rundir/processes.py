"""Summary of what the hooks files of a run say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoprof.rundir import decoder
from autoprof.rundir.layout import RunDir
from autoprof.rundir.records import HooksFile

WAITING = "the module was not imported here"


def summary(directory: RunDir, versions: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return what `run.json` says of a run's processes: hosts, versions, recipes used. What can't be read is left out.

    Args:
        directory: The run's.
        versions: Versions that are known besides.
    """
    hosts: set[str] = set()
    recipes: set[str] = set()
    found = dict(versions or {})
    for path in directory.hooks_files():
        process = decoder.read(path, HooksFile)
        if process.host:
            hosts.add(process.host)
        found.update(process.versions)
        recipes |= {key.partition("/")[0] for key, hook in process.hooks.items() if hook.state == "applied"}
    return {"hosts": sorted(hosts), "versions": found, "recipes": sorted(recipes)}
