"""Clock offsets of a Ray cluster's nodes from the trainer's host: `clocks/<host>-<pid>.jsonl`.

Measured in a thread of its own when a captured step begins, by small calls to each node. A call that takes 1 ms gives
the other clock to within half of that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from autoprof.base import files, identity, interrupts, process, threads
from autoprof.base.originals import threading, time
from autoprof.run import cluster
from autoprof.run.hook_log import HookLog
from autoprof.rundir.layout import RunDir
from autoprof.rundir.records import Offset

# A measurement is good for this long: clocks that drift by 1 ms a minute are out of order.
_GOOD_FOR_S = 60.0
# How long a node has for its first answer: Ray may have to start a worker there.
_PATIENCE_S = 30.0
# How long all of a node's further answers may take.
_BRIEFLY_S = 10.0
_PINGS = 9
# A clock that is not known so well is measured again, so many times: the node was busy with something else.
_ROUGH_NS = 2_000_000
_ROUNDS = 5
_PAUSE_S = 0.5
_LOOK_S = 0.2
# How long the end of Ray waits for the thread, which must not be in a call of Ray's then.
_END_S = 2.0


class _State(process.State):
    """The thread that measures, and the times (`time.monotonic`) at which each node was asked last."""

    def begin(self) -> None:
        self.thread: threading.Thread | None = None
        self.asked_at: dict[str, float] = {}
        self.stop = threading.Event()


_state = _State()


def measure(run: RunDir, hooks: HookLog) -> None:
    """Measure, where Ray is up, the nodes that were not measured lately, in a thread, unless one does so already."""
    if not cluster.is_up() or (_state.thread is not None and _state.thread.is_alive()):
        return
    import ray

    _state.stop.clear()
    thread = threading.Thread(target=_measure, args=(run, hooks, ray), name="autoprof-clocks", daemon=True)
    with interrupts.suppress(RuntimeError):  # there may be no more threads
        threads.start(thread.start)
        _state.thread = thread


def stop() -> None:
    """End the measurement: Ray is about to end."""
    _state.stop.set()
    if _state.thread is not None and _state.thread is not threading.current_thread():
        _state.thread.join(_END_S)


def _measure(run: RunDir, hooks: HookLog, ray: Any) -> None:
    try:
        here = ray.get_runtime_context().get_node_id()
        others = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != here]
        now = time.monotonic()
        others = [node for node in others if now - _state.asked_at.get(node, float("-inf")) >= _GOOD_FOR_S]
        _state.asked_at.update(dict.fromkeys(others, now))
        found = offsets(ray, others) if others else []
        if found:
            write(run, found)
    except Exception as error:
        interrupts.pass_on(error)
        if not _state.stop.is_set():
            hooks.error("clocks", f"{type(error).__name__}: {error}")


def write(run: RunDir, found: Sequence[Offset]) -> None:
    """Add a line for each host.

    Raises:
        OSError: They can't be written.
    """
    path = run.process_file("clocks", ".jsonl")
    run.make(path.parent)
    files.append(path, msgspec.json.Encoder().encode_lines(found))


def offsets(ray: Any, nodes: Sequence[str], host: Callable[[str, str], str] = lambda node, name: name) -> list[Offset]:
    """Measure the clocks of these nodes. Those that don't answer in time, and those of this host, are left out.

    Args:
        ray: The module, connected to a cluster.
        nodes: Ray's ids of nodes.
        host: Gives the name of a node with this id and host name.
    """
    ask = ray.remote(_asked())
    on_node = {node: cluster.on_node(ask, node, "autoprof_clock") for node in nodes}
    waiting = {call.remote(): node for node, call in on_node.items()}
    found: dict[str, Offset] = {}
    deadline = time.monotonic() + _PATIENCE_S
    while waiting and time.monotonic() < deadline and not _state.stop.is_set():
        answered, _ = ray.wait(list(waiting), num_returns=1, timeout=_LOOK_S)
        for reference in answered:
            node = waiting.pop(reference)
            _better(found, node, ray, on_node[node], host)
    for reference in waiting:
        ray.cancel(reference)
    for _ in range(_ROUNDS):
        rough = [node for node, known in found.items() if known.error_ns > _ROUGH_NS and known.host != identity.HOST]
        if not rough or _state.stop.wait(_PAUSE_S) or time.monotonic() > deadline:
            break
        for node in rough:
            _better(found, node, ray, on_node[node], host)
    return [measured for measured in found.values() if measured.host != identity.HOST]


def _better(found: dict[str, Offset], node: str, ray: Any, call: Any, host: Callable[[str, str], str]) -> None:
    """Measure a node, and keep what is known better than before."""
    try:
        measured = _node(ray, call, node, host)
    except Exception as error:  # the node has gone
        interrupts.pass_on(error)
        return
    if measured is not None and (node not in found or measured.error_ns < found[node].error_ns):
        found[node] = measured


def _node(ray: Any, call: Any, node: str, host: Callable[[str, str], str]) -> Offset | None:
    """Measure the clock of one node, by the fastest of several calls."""
    best: Offset | None = None
    deadline = time.monotonic() + _BRIEFLY_S
    for _ in range(_PINGS):
        sent, begun = time.time_ns(), time.monotonic_ns()
        reference = call.remote()
        # In short waits: the end of Ray must not find the thread in one.
        while not ray.wait([reference], timeout=_LOOK_S)[0]:
            if _state.stop.is_set() or time.monotonic() > deadline:
                return best
        name, theirs = ray.get(reference)
        half = (time.monotonic_ns() - begun) // 2
        if best is None or half < best.error_ns:
            middle = sent + half
            called = host(node, identity.host_name(name))
            best = Offset(host=called, offset_ns=theirs - middle, error_ns=half, unix_ns=middle)
        if _state.stop.is_set() or time.monotonic() > deadline:
            break
    return best


def _asked() -> Callable[[], tuple[str, int]]:
    """Return the function that answers on the other node.

    It is made here, so that it is shipped by value to nodes that have no autoprof.
    """

    def autoprof_clock() -> tuple[str, int]:
        import socket
        import time

        return socket.gethostname(), time.time_ns()

    return autoprof_clock
