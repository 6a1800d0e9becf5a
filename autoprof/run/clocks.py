"""Measurement of the clocks of a Ray cluster's nodes: `clocks/<host>-<pid>.jsonl`.

A clock offset is the time of a node's clock minus the time of the trainer's clock. When a captured step begins, a
thread measures the offsets by short calls to each node. A call that takes 1 ms gives the offset with an error of at
most 0.5 ms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from autoprof.base import files, identity, process, seam
from autoprof.base.originals import threading, time
from autoprof.base.seam import described
from autoprof.run import cluster
from autoprof.run.journal import HookLog
from autoprof.rundir.layout import RunDir
from autoprof.rundir.records import Offset

# Age of a measurement from which it is repeated. Working clocks drift by less than 1 ms per minute.
_REPEAT_AFTER_S = 60.0
# Timeout for the first answer of a node, because Ray may have to start a worker on the node.
_FIRST_ANSWER_S = 30.0
# Timeout for all later answers of a node together.
_FURTHER_ANSWERS_S = 10.0
_PINGS = 9
# If the error of an offset is larger, the node was busy. The offset is then measured again, at most _ROUNDS times.
_MAX_ERROR_NS = 2_000_000
_ROUNDS = 5
_PAUSE_S = 0.5
_POLL_S = 0.2
# Maximum wait for the thread before Ray shuts down. The thread must not be inside a call of Ray when Ray shuts down.
_END_S = 2.0


class _ClockState(process.State):
    """The thread that measures the clocks, and the time (`time.monotonic`) of the last measurement of each node."""

    def reset(self) -> None:
        self.thread: threading.Thread | None = None
        self.asked_at: dict[str, float] = {}
        self.stop = process.Latch()


_state = _ClockState()


def measure(run: RunDir, hooks: HookLog) -> None:
    """Start a thread that measures the clocks of all nodes whose last measurement is old.

    Do nothing if the thread is already running or Ray is not up.
    """
    if not cluster.is_up() or (_state.thread is not None and _state.thread.is_alive()):
        return
    import ray

    _state.stop.clear()
    thread = threading.Thread(target=_measure_clocks, args=(run, hooks, ray), name="autoprof-clocks", daemon=True)
    with seam.suppress(RuntimeError):  # the limit of threads is reached
        process.start_thread(thread.start)
        _state.thread = thread


def stop() -> None:
    """Stop the thread, because Ray is about to shut down. Wait at most 2 s for its end."""
    _state.stop.set()
    if _state.thread is not None and _state.thread is not threading.current_thread():
        _state.thread.join(_END_S)


def _measure_clocks(run: RunDir, hooks: HookLog, ray: Any) -> None:
    def report(what: str, error: BaseException) -> None:
        if not _state.stop.is_set():
            hooks.error(what, described(error))

    with seam.guard("clocks", report):
        own_node = ray.get_runtime_context().get_node_id()
        other_nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != own_node]
        now = time.monotonic()
        other_nodes = [
            node for node in other_nodes if now - _state.asked_at.get(node, float("-inf")) >= _REPEAT_AFTER_S
        ]
        _state.asked_at.update(dict.fromkeys(other_nodes, now))
        measured_offsets = offsets(ray, other_nodes) if other_nodes else []
        if measured_offsets:
            write(run, measured_offsets)


def write(run: RunDir, measured: Sequence[Offset]) -> None:
    """Append the offsets to the clocks file of this process, one line for each host.

    Raises:
        OSError: The file can't be written.
    """
    path = run.process_file("clocks", ".jsonl")
    run.make(path.parent)
    files.append(path, msgspec.json.Encoder().encode_lines(measured))


def offsets(
    ray: Any, nodes: Sequence[str], host_to_write: Callable[[str, str], str] = lambda node, name: name
) -> list[Offset]:
    """Measure the clocks of nodes. Omit nodes on this host, and nodes that do not answer in time.

    Args:
        ray: The module `ray`, connected to a cluster.
        nodes: Ray's ids of the nodes.
        host_to_write: Function that returns the host name to write, from Ray's id of a node and the node's own host
            name.
    """
    task = cluster.shipped(ray, cluster.NODE_FUNCTIONS)
    on_node = {node: cluster.on_node(task, node, "autoprof_clock") for node in nodes}
    waiting = {call.remote("clock"): node for node, call in on_node.items()}
    best: dict[str, Offset] = {}
    deadline = time.monotonic() + _FIRST_ANSWER_S
    while waiting and time.monotonic() < deadline and not _state.stop.is_set():
        answered, _ = ray.wait(list(waiting), num_returns=1, timeout=_POLL_S)
        for reference in answered:
            node = waiting.pop(reference)
            _measure_again(best, node, ray, on_node[node], host_to_write)
    for reference in waiting:
        ray.cancel(reference)
    for _ in range(_ROUNDS):
        inexact_nodes = [
            node for node, offset in best.items() if offset.error_ns > _MAX_ERROR_NS and offset.host != identity.HOST
        ]
        if not inexact_nodes or _state.stop.wait(_PAUSE_S) or time.monotonic() > deadline:
            break
        for node in inexact_nodes:
            _measure_again(best, node, ray, on_node[node], host_to_write)
    return [offset for offset in best.values() if offset.host != identity.HOST]


def _measure_again(
    best: dict[str, Offset], node: str, ray: Any, call: Any, host_to_write: Callable[[str, str], str]
) -> None:
    """Measure the clock of a node. Keep the new offset in `best` if its error is smaller than before.

    Args:
        best: Dict from Ray's id of a node to the best offset so far.
        node: Ray's id of the node.
        ray: The module `ray`, connected to a cluster.
        call: Remote function that runs on the node.
        host_to_write: Function that returns the host name to write, from Ray's id of the node and the node's own host
            name.
    """
    try:
        new_offset = _measure_node(ray, call, node, host_to_write)
    except ray.exceptions.RayError:  # the node has died
        return
    if new_offset is not None and (node not in best or new_offset.error_ns < best[node].error_ns):
        best[node] = new_offset


def _measure_node(ray: Any, call: Any, node: str, host_to_write: Callable[[str, str], str]) -> Offset | None:
    """Measure the clock of a node by several calls. Return the offset of the fastest call, or None if none is answered.

    Args:
        ray: The module `ray`, connected to a cluster.
        call: Remote function that runs on the node.
        node: Ray's id of the node.
        host_to_write: Function that returns the host name to write, from Ray's id of the node and the node's own host
            name.
    """
    best_offset: Offset | None = None
    deadline = time.monotonic() + _FURTHER_ANSWERS_S
    for _ in range(_PINGS):
        sent_ns, begin_ns = time.time_ns(), time.monotonic_ns()
        reference = call.remote("clock")
        # Wait with short timeouts: Ray must not shut down while this thread waits in it.
        while not ray.wait([reference], timeout=_POLL_S)[0]:
            if _state.stop.is_set() or time.monotonic() > deadline:
                return best_offset
        name, remote_ns = ray.get(reference)
        half_ns = (time.monotonic_ns() - begin_ns) // 2
        if best_offset is None or half_ns < best_offset.error_ns:
            middle_ns = sent_ns + half_ns
            result_host = host_to_write(node, identity.host_name(name))
            best_offset = Offset(host=result_host, offset_ns=remote_ns - middle_ns, error_ns=half_ns, unix_ns=middle_ns)
        if _state.stop.is_set() or time.monotonic() > deadline:
            break
    return best_offset
