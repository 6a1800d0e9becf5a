"""Questions to the nodes of a run, by Ray tasks on each."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol

from autoprof.base.originals import threading, time
from autoprof.run.cluster import tasks
from autoprof.run.collect.remote import functions

# How long a node has for an answer: Ray may have to start a worker there, and a disk may be slow.
_PATIENCE_S = 120.0
_LOOK_S = 0.2
_TRIES = 3
# So many pieces are on their way at a time.
AT_A_TIME = 3


class Lost(Exception):
    """A node does not answer (any more). The message says why."""


class Out(Lost):
    """There is no time left to wait for any node."""


class Asked(NamedTuple):
    """A question that is on its way since a moment (`time.monotonic`)."""

    name: str
    arguments: tuple[Any, ...]
    answer: Any
    since: float


class Source(Protocol):
    """A node's part of the run, from which the functions of `remote` read."""

    def ask(self, name: str, *arguments: Any) -> Asked:
        """Send a question."""

    def answer(self, asked: Asked) -> Any:
        """Wait for the answer.

        Raises:
            Lost: There is none.
        """


def answers(source: Source, name: str, questions: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
    """Yield the answers to questions of one kind, in order, with a few of them on their way at a time.

    Raises:
        Lost: There is none to one of them.
    """
    under_way: deque[Asked] = deque()
    for arguments in questions:
        under_way.append(source.ask(name, *arguments))
        if len(under_way) == AT_A_TIME:
            yield source.answer(under_way.popleft())
    while under_way:
        yield source.answer(under_way.popleft())


class Patience:
    """The time that all questions may take together. `stop` ends it from another thread."""

    def __init__(self, seconds: float | None = None) -> None:
        self._until = None if seconds is None else time.monotonic() + seconds
        self.stop = threading.Event()

    @property
    def out(self) -> bool:
        return self.stop.is_set() or (self._until is not None and time.monotonic() > self._until)


class OnRay:
    """Asks one node of a cluster that this process is connected to."""

    def __init__(self, ray: Any, node: str, patience: Patience) -> None:
        self._ray = ray
        self._node = node
        self._patience = patience
        self._functions = {
            name: tasks.on_node(ray.remote(function), node, f"autoprof_collect_{name}")
            for name, function in functions().items()
        }

    def ask(self, name: str, *arguments: Any) -> Asked:
        return Asked(name, arguments, self._functions[name].remote(*arguments), time.monotonic())

    def answer(self, asked: Asked) -> Any:
        for tries in range(1, _TRIES + 1):
            try:
                # Several nodes that don't answer are waited for together.
                return self._wait(asked.answer, asked.since + _PATIENCE_S)
            except Lost:
                raise
            except Exception as error:  # Ray's own, of a worker or a node that died
                if tries == _TRIES or not self._alive():
                    raise Lost(self._why(error)) from None
                asked = self.ask(asked.name, *asked.arguments)

    def _wait(self, reference: Any, deadline: float) -> Any:
        # In short waits: the end of Ray must not find a thread in one.
        while not self._ray.wait([reference], timeout=_LOOK_S)[0]:
            if self._patience.out:
                self._ray.cancel(reference)
                raise Out("there was no time left")
            if time.monotonic() > deadline:
                self._ray.cancel(reference)
                raise Lost(f"no answer within {_PATIENCE_S:.0f} s")
        if self._patience.out:
            raise Out("there was no time left")
        return self._ray.get(reference)

    def _alive(self) -> bool:
        return any(node["NodeID"] == self._node and node["Alive"] for node in self._ray.nodes())

    def _why(self, error: Exception) -> str:
        first = (str(error).strip().splitlines() or [""])[0]
        return f"{type(error).__name__}: {first[:200]}" if self._alive() else DIED


DIED = "the node has died"
