"""Nodes of a Ray cluster that a run works on: an entry of each in Ray's key-value store, `node/<run id>/<node id>`.

A node is asked for its files. The entry of a node that has died says that there were some.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import msgspec

from autoprof.base import identity, interrupts, log
from autoprof.base.originals import os
from autoprof.run.cluster import kv

_BEGINS = "node/"


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A node that the run works on.

    Attributes:
        id: Ray's id of it.
        host: Its name as files have it.
        directory: The folder of its part of the run.
        disk: The identity of that folder, the same for all that share the disk (`disk_of`).
        driver: Whether the process that started the run is on it.
        uid: The user that started the run; None in entries of older releases.
    """

    id: str
    host: str
    directory: str
    disk: str = ""
    driver: bool = False
    uid: int | None = None


def register(run_id: str, directory: str, driver: bool, uid: int | None = None) -> tuple[str, str]:
    """Register this process's node with the run, where Ray is up. Raises nothing.

    Returns:
        Ray's id of the node and the address of its cluster, or empty texts where Ray is not up.
    """
    here = address = ""
    try:
        if not kv.up():
            return "", ""
        import ray

        here = str(ray.get_runtime_context().get_node_id())
        disk = disk_of(directory)
        node = Node(id=here, host=identity.HOST, directory=directory, disk=disk, driver=driver, uid=uid)
        kv.put(f"{_BEGINS}{run_id}/{here}", msgspec.json.encode(node), overwrite=driver)
        address = kv.address()
    except Exception as error:  # the run goes on, and the node is found as long as it lives
        interrupts.pass_on(error)
        log.debug(f"this node could not be registered: {type(error).__name__}: {error}")
    return here, address


def of_run(run_id: str) -> Sequence[Node]:
    """Return the nodes that have registered; entries that can't be read are left out."""
    return [node for _, node in _entries(f"{run_id}/")]


def users() -> dict[str, int | None]:
    """Return the user of each run that nodes have registered for, by the run's id, oldest run first."""
    return {run_id: node.uid for run_id, node in sorted(_entries(""), key=lambda entry: entry[0])}


def _entries(prefix: str) -> list[tuple[str, Node]]:
    """Return the run's id and the node of each entry; entries that can't be read are left out."""
    found = []
    for key, value in kv.entries(f"{_BEGINS}{prefix}").items():
        with contextlib.suppress(msgspec.MsgspecError):
            run_id = key.removeprefix(_BEGINS).partition("/")[0]
            found.append((run_id, msgspec.json.decode(value, type=Node)))
    return found


def disk_of(directory: str) -> str:
    """Return the identity of a folder on its machine, or an empty text where there is none.

    A node that is started anew on the same machine has another id and the same folder. `collect.remote` has this too,
    since it goes to nodes without autoprof.
    """
    try:
        found = os.stat(directory)
    except OSError as error:
        interrupts.pass_on(error)
        return ""
    return f"{identity.machine()}:{found.st_dev}:{found.st_ino}"


def public(nodes: Sequence[Node]) -> list[dict[str, Any]]:
    """Return nodes as `run.json` has them."""
    return [{"id": node.id, "host": node.host, "directory": node.directory} for node in nodes]
