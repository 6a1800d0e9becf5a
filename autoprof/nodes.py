"""Which nodes of a Ray cluster a run works on: an entry of each in Ray's key-value store, `node/<run id>/<node id>`.

What a node leaves is found by asking it. The entry is for the node that has died: it says that there was something.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any

import msgspec

from autoprof import interrupts, log, rundir, store

_BEGINS = "node/"


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A node that the run works on.

    Attributes:
        id: Ray's id of it.
        host: Its name as files have it.
        directory: Where it has its part of the run.
        disk: Which folder that is, the same for all who have that disk in common (`identity`).
        driver: Whether the process that started the run is on it.
    """

    id: str
    host: str
    directory: str
    disk: str = ""
    driver: bool = False


def register(run_id: str, directory: str, driver: bool) -> str:
    """Say, where Ray is up, that this process's node works on the run. Raises nothing.

    Returns:
        Ray's id of the node, or an empty text where Ray is not up.
    """
    here = ""
    try:
        if not store.up():
            return ""
        import ray

        here = str(ray.get_runtime_context().get_node_id())
        node = Node(id=here, host=rundir.HOST, directory=directory, disk=identity(directory), driver=driver)
        store.put(f"{_BEGINS}{run_id}/{here}", msgspec.json.encode(node), overwrite=driver)
    except Exception as error:  # the run goes on, and the node is found as long as it lives
        interrupts.pass_on(error)
        log.debug(f"this node could not be registered: {type(error).__name__}: {error}")
    return here


def of_run(run_id: str) -> Sequence[Node]:
    """The nodes that have registered; entries that can't be read are left out."""
    found = []
    for key in store.keys(f"{_BEGINS}{run_id}/"):
        try:
            found.append(msgspec.json.decode(store.get(key) or b"", type=Node))
        except msgspec.MsgspecError:
            continue
    return found


def runs() -> Sequence[str]:
    """The ids of the runs that nodes have registered for, oldest first."""
    return sorted({key.removeprefix(_BEGINS).partition("/")[0] for key in store.keys(_BEGINS)})


def identity(directory: str) -> str:
    """Which folder of which machine this is, or an empty text where there is none.

    A node that is started anew on the same machine has another id and the same folder.
    """
    try:
        found = os.stat(directory)
    except OSError as error:
        interrupts.pass_on(error)
        return ""
    # As `collect.remote` has it.
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            machine = file.read().strip()
    except OSError as error:
        interrupts.pass_on(error)
        machine = socket.gethostname()
    return f"{machine}:{found.st_dev}:{found.st_ino}"


def public(nodes: Sequence[Node]) -> list[dict[str, Any]]:
    """Nodes as `run.json` has them."""
    return [{"id": node.id, "host": node.host, "directory": node.directory} for node in nodes]
