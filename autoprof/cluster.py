"""A Ray cluster and the runs in it, for commands that are given its address. Ray is imported when one is."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from autoprof import listening, listing, store, watching
from autoprof.control import Trigger, new_name
from autoprof.listening import Registered
from autoprof.redaction import hidden
from autoprof.watching import Gone, View

# How long a node has for an answer: Ray may have to start a worker there.
_PATIENCE_S = 60.0
# How long its head has to be there at all.
_HEAD_S = 5.0


class Unreachable(Exception):
    """There is no way to the cluster. The message says what was tried and what is wrong."""


class Lost(Gone):
    """The cluster itself is not there any more. Who calls Ray then waits for a minute, and is ended by it."""


@contextlib.contextmanager
def connected(address: str) -> Iterator[Any]:
    """The module `ray`, connected to the cluster at `address`, as `ray.init` takes it, until the block ends.

    Raises:
        Unreachable: It is not there, or is of another release.
    """
    try:
        import ray
    except ImportError:
        raise Unreachable("there is no Ray here; take the environment of the run's driver") from None
    try:
        # Where nobody listens `ray.init` tries for a quarter of an hour (Ray 2.60, ray/_private/node.py).
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
        said = " ".join(str(error).split())[:300]
        raise Unreachable(hidden(f"no Ray cluster at {address!r}: {said}")) from None
    try:
        yield ray
    except Lost:
        raise
    except BaseException:
        ray.shutdown()
        raise
    ray.shutdown()


def find(ray: Any, name: str) -> InRay:
    """The run called `name`: an id, the beginning of one, or `latest` of those that go on.

    Raises:
        NotFound: There is none, or several.
    """
    known = []
    for key in store.keys(listening.registered("")):
        with contextlib.suppress(msgspec.MsgspecError):
            known.append(msgspec.json.decode(store.get(key) or b"", type=Registered))
    known.sort(key=lambda run: run.started)
    if name == "latest":
        for run in reversed(known):
            place = InRay(ray, run)
            with contextlib.suppress(Gone):
                if place.look()[0].alive:
                    return place
        raise listing.NotFound(f"no run goes on in this cluster; {_there(known)}")
    matching = [run for run in known if run.id.startswith(name)]
    if len(matching) != 1:
        what = "several runs match" if matching else "no run matches"
        raise listing.NotFound(f"{what} {name!r} in this cluster; {_there(matching or known)}")
    return InRay(ray, matching[0])


class InRay:
    """A run that is asked, and looked at, through Ray: by small tasks on its nodes.

    Attributes:
        run: What the process that counts its steps said of it.
    """

    def __init__(self, ray: Any, run: Registered) -> None:
        self.run = run
        self._ray = ray
        self._task = ray.remote(watching.reader())
        # Through ray:// the head is out of sight.
        self._head = "" if ray.util.client.ray.is_connected() else ray.get_runtime_context().gcs_address

    def ask(self, trigger: Trigger) -> str:
        """Leave a request, ring the bell, and return the request's name."""
        name = new_name()
        asked = msgspec.structs.replace(trigger, run=self.run.id)
        store.put(listening.asked(self.run.id, name), msgspec.json.encode(asked))
        # Last: whoever hears it finds the request.
        store.put(listening.bell(self.run.id), name.encode())
        return name

    def standing(self, trigger: Trigger, view: View) -> str | None:
        """The name of a request with this content that is not over, taken or not."""
        if (name := view.standing(trigger)) is not None:
            return name
        prefix = listening.asked(self.run.id)
        for key in store.keys(prefix):
            with contextlib.suppress(msgspec.MsgspecError):
                asked = msgspec.json.decode(store.get(key) or b"", type=Trigger)
                if watching.same(msgspec.to_builtins(asked), trigger):
                    return key.removeprefix(prefix)
        return None

    def pending(self, name: str) -> bool:
        """Whether nobody has taken the request from Ray's store.

        Raises:
            Lost: There is no cluster any more.
        """
        self._check()
        return store.get(listening.asked(self.run.id, name)) is not None

    def look(self, steps: Sequence[int] = ()) -> list[View]:
        """The run as it is now, on the node where its steps are counted, then on the others if there are steps.

        Raises:
            Gone: That node has gone, or does not answer.
        """
        self._check()
        alive = {node["NodeID"] for node in self._ray.nodes() if node["Alive"]}
        if self.run.node not in alive:
            raise Gone(f"the node of the run's trainer, {self.run.host}, has gone")
        nodes = [self.run.node, *sorted(alive - {self.run.node})] if steps else [self.run.node]
        calls = [self._call(node, steps) for node in nodes]
        done, late = self._ray.wait(calls, num_returns=len(calls), timeout=_PATIENCE_S)
        for call in late:
            self._ray.cancel(call)
        views = []
        for node, call in zip(nodes, calls, strict=True):
            try:
                views.append(watching.view(self._ray.get(call) if call in done else {}))
            except Exception as error:  # a node that has gone meanwhile
                if node == self.run.node:
                    why = f"{type(error).__name__}" if call in done else f"no answer within {_PATIENCE_S:g} s"
                    raise Gone(f"the node of the run's trainer, {self.run.host}, can't be asked: {why}") from None
        return [view for place, view in enumerate(views) if place == 0 or view.info]

    def _check(self) -> None:
        try:
            _reach(self._head)
        except OSError:
            raise Lost("the run has ended, or its cluster: Ray's head is not there any more") from None

    def _call(self, node: str, steps: Sequence[int]) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        options = {
            "num_cpus": 0,
            "max_retries": 0,
            "name": "autoprof_look",
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=node, soft=False),
        }
        return self._task.options(**options).remote(self.run.directory, list(steps), self.run.pid, self.run.ticks)


def _reach(address: str) -> None:
    """Connect to HOST:PORT, if the address is of that form.

    Raises:
        OSError: Nobody listens there.
        OverflowError: There is no such port.
        UnicodeError: That is no host's name.
    """
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), _HEAD_S).close()


def _there(runs: Sequence[Registered]) -> str:
    return f"there are {', '.join(run.id for run in runs[-5:]) or 'none'}"
