"""Summary of what the hooks files of a run say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoprof.base import identity
from autoprof.base.originals import os
from autoprof.rundir import decoder
from autoprof.rundir.layout import RunDir
from autoprof.rundir.records import HooksFile

WAITING = "the module was not imported here"
_LOOPBACK = ("127.", "localhost:", "[::1]:")


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
        hooks_file = decoder.read(path, HooksFile)
        if hooks_file.host:
            hosts.add(hooks_file.host)
        found.update(hooks_file.versions)
        recipes |= {key.partition("/")[0] for key, hook in hooks_file.hooks.items() if hook.state == "applied"}
    return {"hosts": sorted(hosts), "versions": found, "recipes": sorted(recipes)}


def ray_address(directory: RunDir) -> str:
    """Return the address of the run's Ray cluster, as the newest hooks file names it; an empty text if none does.

    An address of the loopback counts only on the host that wrote it: on another host it names another cluster.
    """
    for path in sorted(directory.hooks_files(), key=os.path.getmtime, reverse=True):
        hooks_file = decoder.read(path, HooksFile)
        if hooks_file.ray and (hooks_file.host == identity.HOST or not hooks_file.ray.startswith(_LOOPBACK)):
            return hooks_file.ray
    return ""
