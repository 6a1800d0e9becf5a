"""Ray cluster of a run: its key-value store, its nodes, small tasks on chosen nodes, and connections of commands.

All keys share one namespace. A call of the store is a round trip to the head node, a few hundred microseconds.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from autoprof.base import identity, interrupts, log
from autoprof.base.exception_text import reason
from autoprof.base.exceptions import type_name
from autoprof.base.originals import os
from autoprof.base.redact import hidden

_NAMESPACE = b"autoprof"


def is_up() -> bool:
    """Return whether this process is connected to Ray, without importing it."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(getattr(ray, "is_initialized", bool)())


def own_address() -> str:
    """Return HOST:PORT of the cluster that this process is connected to; an empty text if it is a client of Ray's.

    A client (`ray://`) does not know the address of the cluster's head.
    """
    import ray

    return "" if ray.util.client.ray.is_connected() else str(ray.get_runtime_context().gcs_address)


def put(key: str, value: bytes, overwrite: bool = True) -> bool:
    """Keep `value`, without `overwrite` only where nothing is kept yet; return whether there is a store."""
    if not is_up():
        return False
    _kv()._internal_kv_put(key.encode(), value, overwrite=overwrite, namespace=_NAMESPACE)
    return True


def claim(key: str) -> bool:
    """Keep an empty value under `key`; return False where another process has. Of several that try one succeeds.

    Where there is no store, all succeed.
    """
    return not is_up() or not _kv()._internal_kv_put(key.encode(), b"", overwrite=False, namespace=_NAMESPACE)


def get(key: str) -> bytes | None:
    """Return the value under `key`, or None."""
    found: bytes | None = _kv()._internal_kv_get(key.encode(), namespace=_NAMESPACE) if is_up() else None
    return found


def delete(key: str) -> bool:
    """Delete `key`; return whether it had a value, which is so for one of several that try at a time."""
    return is_up() and bool(_kv()._internal_kv_del(key.encode(), namespace=_NAMESPACE))


def keys(prefix: str) -> Sequence[str]:
    """Return the keys that begin with `prefix`, in order."""
    if not is_up():
        return ()
    return sorted(key.decode() for key in _kv()._internal_kv_list(prefix.encode(), namespace=_NAMESPACE))


def entries(prefix: str) -> dict[str, bytes]:
    """Return the values of all keys that begin with `prefix`, in two round trips (with Ray 2.60)."""
    found = keys(prefix)
    client = getattr(_kv(), "global_gcs_client", None) if found else None
    if client is None or not hasattr(client, "internal_kv_multi_get"):
        return {key: value for key in found if (value := get(key)) is not None}
    many = client.internal_kv_multi_get([key.encode() for key in found], _NAMESPACE)
    return {key.decode(): value for key, value in many.items()}


def _kv() -> Any:
    from ray.experimental import internal_kv

    return internal_kv


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


def register_node(run_id: str, directory: str, driver: bool, uid: int | None = None) -> tuple[str, str]:
    """Register this process's node with the run, where Ray is up. Raises nothing.

    Returns:
        Ray's id of the node and the address of its cluster, or empty texts where Ray is not up.
    """
    here = address = ""
    try:
        if not is_up():
            return "", ""
        import ray

        here = str(ray.get_runtime_context().get_node_id())
        disk = disk_of(directory)
        node = Node(id=here, host=identity.HOST, directory=directory, disk=disk, driver=driver, uid=uid)
        put(f"{_BEGINS}{run_id}/{here}", msgspec.json.encode(node), overwrite=driver)
        address = own_address()
    except Exception as error:  # the run goes on, and the node is found as long as it lives
        interrupts.pass_on(error)
        log.debug(f"this node could not be registered: {type(error).__name__}: {error}")
    return here, address


def nodes_of_run(run_id: str) -> Sequence[Node]:
    """Return the nodes that have registered; entries that can't be read are left out."""
    return [node for _, node in _entries(f"{run_id}/")]


def users_of_run() -> dict[str, int | None]:
    """Return the user of each run that nodes have registered for, by the run's id, oldest run first."""
    return {run_id: node.uid for run_id, node in sorted(_entries(""), key=lambda entry: entry[0])}


def _entries(prefix: str) -> list[tuple[str, Node]]:
    """Return the run's id and the node of each entry; entries that can't be read are left out."""
    found = []
    for key, value in entries(f"{_BEGINS}{prefix}").items():
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


def is_public(nodes: Sequence[Node]) -> list[dict[str, Any]]:
    """Return nodes as `run.json` has them."""
    return [{"id": node.id, "host": node.host, "directory": node.directory} for node in nodes]


def on_node(task: Any, node: str, name: str) -> Any:
    """Return a remote function that runs on the node with this id, or nowhere, and that Ray shows as `name`."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    strategy = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    return task.options(num_cpus=0, max_retries=0, name=name, scheduling_strategy=strategy)


# How long a node has for an answer: Ray may have to start a worker there.
_PATIENCE_S = 60.0
# How long its head has to be there at all.
_HEAD_S = 5.0


class Unreachable(Exception):
    """The cluster can't be reached. The message says what was tried and what is wrong."""


class Gone(Exception):
    """The run can't be looked at any more. The message says why."""


class Lost(Gone):
    """The cluster itself is not there any more. A call of Ray's then waits for a minute, and ends the process."""


@contextlib.contextmanager
def connected(address: str) -> Iterator[Any]:
    """Yield the module `ray`, connected to the cluster at `address`, as `ray.init` takes it, until the block ends.

    Raises:
        Unreachable: It is not there, or is of another release; or the address names no cluster.
    """
    if "local" in (address, os.environ.get("RAY_ADDRESS") if address == "auto" else ""):
        raise Unreachable("'local' starts a Ray cluster and names none; give HOST:PORT of one that is running")
    try:
        import ray
    except ImportError:
        raise Unreachable("there is no Ray here; take the environment of the run's driver") from None
    try:
        # Where nothing listens `ray.init` tries for a quarter of an hour (Ray 2.60, ray/_private/node.py).
        if "://" not in address:
            _reach(address)
    except (OSError, OverflowError, UnicodeError) as error:
        said = getattr(error, "strerror", None) or error
        raise Unreachable(hidden(f"no Ray cluster at {address!r}: nothing answers there ({said})")) from None
    try:
        # Workers of a cluster that a run started would think that they belong to it.
        off = {"env_vars": {"AUTOPROF": "0"}}
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, runtime_env=off)
    except Exception as error:
        raise Unreachable(hidden(f"can't connect to the Ray cluster at {address!r}: {_why(error)}")) from None
    try:
        yield ray
    except Lost:
        raise
    except BaseException:
        ray.shutdown()
        raise
    ray.shutdown()


def _why(error: Exception) -> str:
    """Return what failed, and what to do if it may be the token.

    A missing token is a ConnectionError like others. Only lines of Ray's C++ code on stderr name it (Ray 2.60,
    gcs_client.cc: "InvalidAuthToken").
    """
    said = hidden(" ".join(reason(error).split()), 300)
    kind = type_name(error)
    what = said if said == kind else f"{kind}: {said}"
    if not issubclass(type(error), ConnectionError):
        return what
    return f"{what}; if the cluster has token authentication, set RAY_AUTH_MODE=token and its RAY_AUTH_TOKEN here"


def _reach(address: str) -> None:
    """Connect to HOST:PORT, if the address is of that form.

    Raises:
        OSError: Nothing listens there.
        OverflowError: There is no such port.
        UnicodeError: The host's name is none.
    """
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), _HEAD_S).close()
