"""Access to the Ray cluster of a run: its key-value store, its nodes, and small tasks on chosen nodes.

Commands also connect to the cluster with this module. All keys of autoprof in the store have one namespace. A call of
the store needs a round trip to the head node: a few hundred microseconds.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import socket
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from autoprof.base import files, identity, log, seam
from autoprof.base.exception_text import described, reason
from autoprof.base.exceptions import type_name
from autoprof.base.originals import os
from autoprof.base.redact import hidden

_NAMESPACE = b"autoprof"


def is_up() -> bool:
    """Return True if this process is connected to Ray. Does not import Ray."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(getattr(ray, "is_initialized", bool)())


def own_address() -> str:
    """Return HOST:PORT of the cluster that this process is connected to.

    Return an empty text in a Ray client (`ray://`), because a client does not know the address of the cluster's head.
    """
    import ray

    return "" if ray.util.client.ray.is_connected() else str(ray.get_runtime_context().gcs_address)


def put(key: str, value: bytes, overwrite: bool = True) -> bool:
    """Store `value` under `key`. If `overwrite` is false, keep an existing value. Return False if Ray is not up."""
    if not is_up():
        return False
    _kv()._internal_kv_put(key.encode(), value, overwrite=overwrite, namespace=_NAMESPACE)
    return True


def claim(key: str) -> bool:
    """Store an empty value under `key`, unless `key` has a value. Return True if the value was stored.

    So only the first of several processes gets True. If Ray is not up, return True.
    """
    return not is_up() or not _kv()._internal_kv_put(key.encode(), b"", overwrite=False, namespace=_NAMESPACE)


def get(key: str) -> bytes | None:
    """Return the value under `key`, or None if there is no value or Ray is not up."""
    value: bytes | None = _kv()._internal_kv_get(key.encode(), namespace=_NAMESPACE) if is_up() else None
    return value


def keys(prefix: str) -> Sequence[str]:
    """Return the keys that begin with `prefix`, sorted. If Ray is not up, the result is empty."""
    if not is_up():
        return ()
    return sorted(key.decode() for key in _kv()._internal_kv_list(prefix.encode(), namespace=_NAMESPACE))


def entries(prefix: str) -> dict[str, bytes]:
    """Return a dict from key to value for all keys that begin with `prefix`.

    With Ray 2.60, this takes two round trips.
    """
    matching = keys(prefix)
    client = getattr(_kv(), "global_gcs_client", None) if matching else None
    if client is None or not hasattr(client, "internal_kv_multi_get"):
        return {key: value for key in matching if (value := get(key)) is not None}
    values = client.internal_kv_multi_get([key.encode() for key in matching], _NAMESPACE)
    return {key.decode(): value for key, value in values.items()}


def _kv() -> Any:
    from ray.experimental import internal_kv

    return internal_kv


_NODE_PREFIX = "node/"


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A node that the run works on.

    Attributes:
        id: Ray's id of the node.
        host: The host name of the node, as in file names.
        directory: The path of the run directory on the node.
        disk: The identity of the run directory (`disk_of`). It is equal on all nodes that share the disk.
        driver: True if the process that started the run is on this node.
        uid: The user id of the user who started the run; None if an older release of autoprof registered the node.
    """

    id: str
    host: str
    directory: str
    disk: str = ""
    driver: bool = False
    uid: int | None = None


def register_node(run_id: str, directory: str, driver: bool, uid: int | None = None) -> tuple[str, str]:
    """Register the node of this process with a run, if Ray is up. Never raises.

    Args:
        run_id: The id of the run.
        directory: The path of the run directory.
        driver: True if this process started the run.
        uid: The user id of the user who started the run.

    Returns:
        Ray's id of the node and the address of its cluster. Both are empty texts if Ray is not up.
    """
    node_id = address = ""
    if not is_up():
        return node_id, address
    # If the registration fails, the run continues. `collect` also asks nodes that are not registered.
    with seam.guard("this node could not be registered", lambda what, error: log.debug(f"{what}: {described(error)}")):
        import ray

        node_id = str(ray.get_runtime_context().get_node_id())
        disk = disk_of(directory)
        node = Node(id=node_id, host=identity.HOST, directory=directory, disk=disk, driver=driver, uid=uid)
        put(f"{_NODE_PREFIX}{run_id}/{node_id}", msgspec.json.encode(node), overwrite=driver)
        address = own_address()
    return node_id, address


def nodes_of_run(run_id: str) -> Sequence[Node]:
    """Return the registered nodes of a run. Skip values of the store that can't be decoded."""
    return [node for _, node in _entries(f"{run_id}/")]


def users_of_run() -> dict[str, int | None]:
    """Return a dict from the id of a run to its user id, for all runs with a registered node, sorted by run id."""
    return {run_id: node.uid for run_id, node in sorted(_entries(""), key=lambda entry: entry[0])}


def _entries(prefix: str) -> list[tuple[str, Node]]:
    """Return the run id and the node for each registered node. Skip values of the store that can't be decoded.

    `prefix` is the beginning of the run id; an empty text for all runs.
    """
    nodes = []
    for key, value in entries(f"{_NODE_PREFIX}{prefix}").items():
        with contextlib.suppress(msgspec.MsgspecError):
            run_id = key.removeprefix(_NODE_PREFIX).partition("/")[0]
            nodes.append((run_id, msgspec.json.decode(value, type=Node)))
    return nodes


def disk_of(directory: str) -> str:
    """Return a text that identifies a folder and its machine, or an empty text if the folder does not exist.

    If a node is restarted on the same machine, Ray gives it a new id, but the identity of the folder stays the same.
    `node_functions.py` has a copy of this function, because the code of that module runs on nodes without autoprof.
    """
    status = files.status(directory)
    return "" if status is None else f"{identity.machine()}:{status.st_dev}:{status.st_ino}"


def nodes_for_run_json(nodes: Sequence[Node]) -> list[dict[str, Any]]:
    """Return nodes in the form in which `run.json` has them."""
    return [{"id": node.id, "host": node.host, "directory": node.directory} for node in nodes]


# The module with the functions that `clocks.py` and `collect/` run on other nodes.
NODE_FUNCTIONS = "autoprof.run.node_functions"


def shipped(ray: Any, module: str) -> Any:
    """Return a remote function that calls a function of `module` on a node. Its arguments are the name of that function
    and the arguments of that function.

    The module need not exist on the node, because the remote function contains the source text of the module: Ray
    pickles a nested function by value. The module may use the standard library only. The module is not imported here,
    so that changes that the program made to other modules do not affect the code.
    """
    spec: Any = importlib.util.find_spec(module)
    source: str = spec.loader.get_source(module)
    namespace: dict[str, Any] = {"__name__": module}

    def autoprof_task(function: str, *arguments: Any) -> Any:
        if function not in namespace:
            exec(source, namespace)
        return namespace[function](*arguments)

    return ray.remote(autoprof_task)


def on_node(task: Any, node: str, name: str, retries: int = 0) -> Any:
    """Return a remote function that runs `task` only on the node with the id `node`. Ray's tools show it as `name`.

    If the worker process that runs it dies, Ray calls the function again, at most `retries` times.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    strategy = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    return task.options(num_cpus=0, max_retries=retries, name=name, scheduling_strategy=strategy)


# Timeout for the answer of a node, because Ray may have to start a worker on the node.
_PATIENCE_S = 60.0
# Timeout for a connection to the head of the cluster.
_HEAD_S = 5.0


class Unreachable(Exception):
    """The cluster can't be reached. The message gives the address and the problem."""


class Gone(Exception):
    """The run can no longer be observed. The message gives the reason."""


class Lost(Gone):
    """The cluster no longer exists. A further call of Ray would wait for a minute and then end this process."""


@contextlib.contextmanager
def connected(address: str) -> Iterator[Any]:
    """Connect to the cluster at `address`, and yield the module `ray`. Disconnect when the `with` block ends.

    `address` has one of the forms that `ray.init` takes.

    Raises:
        Unreachable: The cluster does not answer or has another release, Ray is not installed, or the address is wrong.
    """
    if "local" in (address, os.environ.get("RAY_ADDRESS") if address == "auto" else ""):
        raise Unreachable("'local' would start a new Ray cluster; give HOST:PORT of a running one")
    try:
        import ray
    except ImportError:
        raise Unreachable("Ray is not installed here; use the Python environment of the run's driver") from None
    try:
        # Try a connection first. If nothing listens at the address, `ray.init` tries for 15 minutes (Ray 2.60,
        # ray/_private/node.py).
        if "://" not in address:
            _reach(address)
    except (OSError, OverflowError, UnicodeError) as error:
        reason_text = getattr(error, "strerror", None) or error
        raise Unreachable(hidden(f"no Ray cluster at {address!r}: nothing answers there ({reason_text})")) from None
    try:
        # Workers of this connection must not join the run that works in the cluster.
        off = {"env_vars": {"AUTOPROF": "0"}}
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, runtime_env=off)
    except Exception as error:
        raise Unreachable(hidden(f"can't connect to the Ray cluster at {address!r}: {_describe(error)}")) from None
    is_lost = False
    try:
        yield ray
    except Lost:
        is_lost = True
        raise
    finally:
        if not is_lost:
            ray.shutdown()


def _describe(error: Exception) -> str:
    """Describe the error of a failed connection. If a missing token may be the reason, add advice.

    Ray reports a missing token as a plain ConnectionError. Only the C++ code of Ray names the missing token, on stderr
    (Ray 2.60, gcs_client.cc: "InvalidAuthToken").
    """
    message = hidden(" ".join(reason(error).split()), 300)
    kind = type_name(error)
    text = message if message == kind else f"{kind}: {message}"
    if not issubclass(type(error), ConnectionError):
        return text
    return f"{text}; if the cluster has token authentication, set RAY_AUTH_MODE=token and its RAY_AUTH_TOKEN here"


def _reach(address: str) -> None:
    """Open and close a connection to the address, if it has the form HOST:PORT.

    Raises:
        OSError: Nothing listens at the address.
        OverflowError: The port number is too large.
        UnicodeError: The host name is not valid.
    """
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), _HEAD_S).close()
