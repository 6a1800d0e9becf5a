"""Summary of the hooks files of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoprof.base import identity
from autoprof.base.originals import os
from autoprof.rundir import decoder
from autoprof.rundir.layout import RunDir
from autoprof.rundir.records import HooksFile

# Reason in the hooks file for a hook whose module was not imported.
WAITING = "the module was not imported here"
_LOOPBACK = ("127.", "localhost:", "[::1]:")


def summary(directory: RunDir, versions: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the hosts, versions and used recipes of a run's processes, as fields of `run.json`.

    Unreadable hooks files are skipped.

    Args:
        directory: The run directory.
        versions: Further versions, by package.
    """
    hosts: set[str] = set()
    recipes: set[str] = set()
    all_versions = dict(versions or {})
    for path in directory.hooks_files():
        hooks_file = decoder.read(path, HooksFile)
        if hooks_file.host:
            hosts.add(hooks_file.host)
        all_versions.update(hooks_file.versions)
        recipes |= {key.partition("/")[0] for key, hook in hooks_file.hooks.items() if hook.state == "applied"}
    return {"hosts": sorted(hosts), "versions": all_versions, "recipes": sorted(recipes)}


def ray_address(directory: RunDir) -> str:
    """Return the address of the run's Ray cluster from the newest hooks file that has one, or an empty text.

    A loopback address counts only on the host that wrote it, because on another host it means another cluster.
    """
    for path in sorted(directory.hooks_files(), key=os.path.getmtime, reverse=True):
        hooks_file = decoder.read(path, HooksFile)
        if hooks_file.ray and (hooks_file.host == identity.HOST or not hooks_file.ray.startswith(_LOOPBACK)):
            return hooks_file.ray
    return ""
