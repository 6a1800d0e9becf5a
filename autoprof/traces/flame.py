"""Names of operators, and call trees of a trace's threads, for flame graphs.

Names tell which frames are autoprof's or a profiler's, and which functions wait.

Calls with the same callers are one node. A tree keeps at most `MAX_NODES` nodes: calls that would need further nodes
count for their caller.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import islice

from msgspec import Struct

# Category of the events of Python functions, which a profiler records with `stack`.
FUNCTION = "python_function"
# Name of a stage's time outside of all operators: the own time of the range that autoprof puts around the stage.
REST = "rest of the stage"
# Names under which autoprof's frames are summed. OWN_WORK also stands for all events inside of such a frame.
OWN_FRAME, OWN_WORK = "frames of profilers", "autoprof's work"

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
# autoprof's modules. Functions in run/, rundir/ and windows/ call no function of the program. Wrappers do, and a trace
# shows the functions that start the profiler as if they lasted to the end of the trace (torch 2.13).
_FRAME = re.compile(
    r"(?:^|/)autoprof/(?:(?P<leaf>run|rundir|windows)/.*"
    r"|(?:__init__|agent|(?:_boot|base|behaviours|capture|cli|config|hooks)/.*))\.py\(\d+\): "
)
# torch's functions that begin and end recordings and ranges, and that ask for the state of the profiler.
_PROFILER = re.compile(
    r"(?:^|/)torch/(?:profiler|autograd)/profiler\.py\(\d+\): |<built-in method _(?:record_function_|profiler_)"
)
_WAIT = re.compile(
    r"<built-in (?:function (?:sleep|sched_yield|select|wait\w*)>"
    r"|method (?:(?:acquire|__enter__) of _thread\.\w*[lL]ock|get of _queue|\w+ of select\.|recv\w* of _socket"
    r"|accept of _socket|wait of ))"
)


def tidy(category: str, name: str) -> str:
    """Return the name under which the events of an operator are summed.

    The names of Python functions contain the addresses of their objects, which differ in each process. So the addresses
    are removed. The name of a frame of autoprof or of torch's profiler is `OWN_FRAME` or `OWN_WORK`.
    """
    if category != FUNCTION:
        return name
    if (frame := _FRAME.search(name)) is not None:
        return OWN_WORK if frame["leaf"] else OWN_FRAME
    return OWN_FRAME if _PROFILER.search(name) else _ADDRESS.sub("", name)


def waits(category: str, name: str) -> bool:
    """Return True if an operator only waits: for a lock, a queue, a socket, another process or a time."""
    return category == FUNCTION and _WAIT.match(name) is not None


# Maximum number of nodes of a trace while it is read. A node takes about 200 bytes.
MAX_NODES = 50_000
# Maximum number of threads of a flame graph, and of nodes of a thread.
_MAX_THREADS, _MAX_SHOWN = 4, 250
# A node with a smaller share of its thread's time is not shown.
_LEAST_SHARE = 0.002


class FlameNode(Struct, frozen=True, kw_only=True):
    """A call in a flame graph. Calls with the same name and the same callers are summed."""

    parent: int  # The index of the caller in the list of nodes. -1 for a call without a caller.
    name: str  # The name of the operator or function.
    category: str  # The `cat` of its events: cpu_op, user_annotation, python_function ...
    us: float  # Microseconds of the calls, including the functions that they called.


class FlameThread(Struct, frozen=True, kw_only=True):
    """The flame graph of one thread of the host."""

    name: str  # The thread's id in the trace, such as `thread 4711`.
    us: float  # Microseconds of all calls without a caller.
    nodes: list[FlameNode]  # The calls. A caller comes before the functions that it called.


class CallTrees:
    """The call trees of all threads while a trace is read. A node is a number; the nodes of a thread have one root.

    Attributes:
        us: The microseconds of each node.
        calls: The number of calls in each root's tree.
        children: Dict from a node and the operator that it called to the node of these calls.
    """

    def __init__(self) -> None:
        self.us: list[float] = []
        self.calls: dict[int, int] = {}
        self.children: dict[tuple[int, int], int] = {}
        self._parents: list[int] = []
        self._operators: list[int] = []
        self._names: dict[int, str] = {}

    def root(self, name: str) -> int:
        """Return a new root for the thread with this name."""
        number = self._add(-1, -1)
        self._names[number] = name
        self.calls[number] = 0
        return number

    def _add(self, parent: int, operator: int) -> int:
        self.us.append(0.0)
        self._parents.append(parent)
        self._operators.append(operator)
        return len(self.us) - 1

    def child(self, parent: int, operator: int) -> int:
        """Return a new node for the calls of an operator by `parent`. Return `parent` if there are too many nodes."""
        if len(self.us) >= MAX_NODES:
            return parent
        node = self.children[parent, operator] = self._add(parent, operator)
        return node

    def threads(self, operators: Sequence[tuple[str, str]]) -> list[FlameThread]:
        """Return the flame graphs of the threads with the most calls, the thread with the most calls first.

        Args:
            operators: The category and the name of each operator.
        """
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(self._parents):
            children.setdefault(parent, []).append(node)
        roots = sorted(self._names, key=lambda root: -self.calls[root])
        threads = (self._thread(root, children, operators) for root in roots)
        return list(islice((thread for thread in threads if thread.nodes), _MAX_THREADS))

    def _thread(self, root: int, children: dict[int, list[int]], operators: Sequence[tuple[str, str]]) -> FlameThread:
        total_us = sum(self.us[node] for node in children.get(root, ()))
        ordered_nodes = list(children.get(root, ()))
        for node in ordered_nodes:
            ordered_nodes += children.get(node, ())
        large_nodes = [node for node in ordered_nodes if self.us[node] > max(0.0, _LEAST_SHARE * total_us)]
        kept_nodes = set(sorted(large_nodes, key=lambda node: -self.us[node])[:_MAX_SHOWN])
        shown: dict[int, int] = {root: -1}
        nodes: list[FlameNode] = []
        for node in large_nodes:
            if node in kept_nodes and self._parents[node] in shown:
                shown[node] = len(nodes)
                category, name = operators[self._operators[node]]
                parent = shown[self._parents[node]]
                nodes.append(FlameNode(parent=parent, name=name, category=category, us=round(self.us[node], 1)))
        return FlameThread(name=self._names[root], us=round(total_us, 1), nodes=nodes)
