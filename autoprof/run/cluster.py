"""Access to the Ray cluster of a run: its key-value store, the current step, its nodes, and small tasks on nodes.

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

from autoprof.base import files, identity, log, process, seam
from autoprof.base.originals import os
from autoprof.base.redact import hidden
from autoprof.base.seam import described, reason, type_name
from autoprof.config import values

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


def entries(prefix: str) -> dict[str, bytes]:
    """Return a dict from key to value for all keys that begin with `prefix`, sorted; empty if Ray is not up.

    With Ray 2.60, this takes two round trips.
    """
    keys = sorted(_kv()._internal_kv_list(prefix.encode(), namespace=_NAMESPACE)) if is_up() else []
    client = getattr(_kv(), "global_gcs_client", None) if keys else None
    if client is None or not hasattr(client, "internal_kv_multi_get"):
        return {key.decode(): value for key in keys if (value := get(key.decode())) is not None}
    values = client.internal_kv_multi_get(keys, _NAMESPACE)
    return {key.decode(): value for key, value in values.items()}


def _kv() -> Any:
    from ray.experimental import internal_kv

    return internal_kv


class StepAnnouncement(msgspec.Struct, frozen=True, kw_only=True):
    """The current step of the trainer, and the settings for capturing it. No process polls for it.

    The trainer announces the step, and the other processes read the announcement when a stage begins. If Ray is up, the
    announcement is in Ray's key-value store. The trainer has stored it there before the trainer calls a worker. If the
    workers are plain processes, each call of a worker contains the announcement (`announcement_to_send`). In all other
    cases, only the process of the trainer knows the announcement.

    Attributes:
        step: The global step.
        loop: The number of the step's loop.
        captured: True if a window is open in this step.
        overrides: The settings of that window (`Settings.overridden`).
        off: True if autoprof does nothing in this step.
    """

    step: int
    captured: bool
    overrides: dict[str, Any] = {}
    off: bool = False
    loop: int = 1


@values.thread_safe
class Parcel(msgspec.Struct, frozen=True, kw_only=True):
    """An announcement in the form in which it is sent with a call of a worker.

    Attributes:
        number: The number of announcements so far. If a call arrives later than a newer call, the number shows which
            announcement is newer.
        announcement: The announcement; None between two steps.
    """

    number: int
    announcement: StepAnnouncement | None


class _AnnouncementState(process.State):
    """The announcements that this process knows.

    Attributes:
        own: The current announcement of a trainer in this process, or None.
        seen: The announcement that was last read from Ray's store, or None.
        trainer_here: True if the trainer runs in this process.
        posted: The number of announcements of a trainer in this process.
        received: The newest announcement that came with a call.
    """

    def reset(self) -> None:
        self.own: StepAnnouncement | None = None
        self.seen: StepAnnouncement | None = None
        self.trainer_here = False
        self.posted = 0
        self.received = Parcel(number=-1, announcement=None)


_state = _AnnouncementState()


def announce_step(run_id: str, announcement: StepAnnouncement | None) -> None:
    """Announce the current step of the trainer. At the end of a step, announce None."""
    _state.own = announcement
    _state.posted += 1
    if is_up():
        put(_step_key(run_id), msgspec.json.encode(announcement))


def announced_step(run_id: str) -> StepAnnouncement | None:
    """Return the current announcement of the run's trainer, or None between two steps.

    If this process does not know the announcement, it is read from Ray's store.
    """
    if (own_or_received := local_announcement()) is not None:
        return own_or_received
    posted = get(_step_key(run_id))
    _state.seen = None if posted is None else msgspec.json.decode(posted, type=StepAnnouncement | None)
    return _state.seen


def record_trainer() -> None:
    """Record that the trainer runs in this process. Called before the first step of the trainer."""
    _state.trainer_here = True


def own_announcement() -> tuple[bool, StepAnnouncement | None]:
    """Return two values: True if the trainer runs in this process, and the trainer's current announcement or None."""
    return _state.trainer_here or _state.own is not None, _state.own


def local_announcement() -> StepAnnouncement | None:
    """Return the current announcement if this process knows it without a call of Ray's store; otherwise None."""
    return _state.own if _state.own is not None else _state.received.announcement


def announcement_to_send() -> dict[str, Any]:
    """Return the step announcement of the trainer in this process as plain dicts and values, to send it with a call."""
    fields: dict[str, Any] = msgspec.to_builtins(Parcel(number=_state.posted, announcement=_state.own))
    return fields


def receive_announcement(sent: Any) -> bool:
    """Store the trainer's announcement of a step, which came to this process with a remote call.

    Return False if it is not newer than the last announcement that this function stored.

    Raises:
        ValueError: `sent` is not a result of `announcement_to_send`.
    """
    received = msgspec.convert(sent, Parcel)
    if received.number <= _state.received.number:
        return False
    _state.received = received
    return True


def known_step() -> int | None:
    """Return the current step if this process knows it without a call of Ray's store; otherwise None.

    The step comes from the trainer in this process, from a call, or from the last read of Ray's store.
    """
    announcement = local_announcement() or _state.seen
    return announcement.step if announcement is not None else None


def _step_key(run_id: str) -> str:
    return f"step/{run_id}"


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


def register_node(run_id: str, directory: str, is_driver: bool, uid: int | None = None) -> tuple[str, str]:
    """Register the node of this process with a run, if Ray is up. Never raises.

    Args:
        run_id: The id of the run.
        directory: The path of the run directory.
        is_driver: True if this process started the run.
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
        node = Node(id=node_id, host=identity.HOST, directory=directory, disk=disk, driver=is_driver, uid=uid)
        put(f"{_NODE_PREFIX}{run_id}/{node_id}", msgspec.json.encode(node), overwrite=is_driver)
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


# The module with the functions that `clocks.py` and `gather.py` run on other nodes.
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
PATIENCE_S = 60.0
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
            check_connection(address)
    except (OSError, OverflowError, UnicodeError) as error:
        reason_text = getattr(error, "strerror", None) or error
        raise Unreachable(hidden(f"no Ray cluster at {address!r}: nothing answers there ({reason_text})")) from None
    # Workers of this connection must not join the run that works in the cluster.
    options = {"log_to_driver": False, "logging_level": logging.ERROR, "runtime_env": {"env_vars": {"AUTOPROF": "0"}}}
    _, problem = seam.attempt(lambda: ray.init(address=address, **options))
    if problem is not None:
        raise Unreachable(hidden(f"can't connect to the Ray cluster at {address!r}: {_connection_problem(problem)}"))
    is_lost = False
    try:
        yield ray
    except Lost:
        is_lost = True
        raise
    finally:
        if not is_lost:
            ray.shutdown()


def _connection_problem(error: Exception) -> str:
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


def check_connection(address: str) -> None:
    """Open and close a connection to the address, if it has the form HOST:PORT.

    Raises:
        OSError: Nothing listens at the address.
        OverflowError: The port number is too large.
        UnicodeError: The host name is not valid.
    """
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), _HEAD_S).close()
