"""Trigger requests to a run through its Ray cluster."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any

import msgspec

from autoprof.base import identity
from autoprof.cli.trigger import view as trigger_view
from autoprof.cli.trigger.view import View
from autoprof.run.cluster import connect, kv, tasks
from autoprof.run.cluster.connect import Gone, Lost
from autoprof.rundir import runs
from autoprof.windows import inbox
from autoprof.windows.inbox import Registered
from autoprof.windows.trigger_requests import Trigger, new_name


def find(ray: Any, name: str) -> InRay:
    """Find the run called `name`: an id, the beginning of one, or `latest`, the last of this user's running ones.

    Raises:
        NotFound: There is none, or several.
    """
    known = []
    for key in kv.keys(inbox.registered("")):
        with contextlib.suppress(msgspec.MsgspecError):
            known.append(msgspec.json.decode(kv.get(key) or b"", type=Registered))
    known.sort(key=lambda run: run.started)
    if name == "latest":
        for run in reversed(known):
            if not runs.own(run.uid):
                continue
            place = InRay(ray, run)
            with contextlib.suppress(Gone):
                if place.look()[0].alive:
                    return place
        user = identity.user_name(os.geteuid())
        raise runs.NotFound(f"no run of user {user} is running in this cluster; {_there(known)}")
    matching = [run for run in known if run.id.startswith(name)]
    if len(matching) != 1:
        what = "several runs match" if matching else "no run matches"
        raise runs.NotFound(f"{what} {name!r} in this cluster; {_there(matching or known)}")
    return InRay(ray, matching[0])


class InRay:
    """A run in a Ray cluster, asked and looked at by small tasks on its nodes.

    Attributes:
        run: What the process that counts its steps said of it.
    """

    def __init__(self, ray: Any, run: Registered) -> None:
        self.run = run
        self._ray = ray
        self._task = ray.remote(trigger_view.reader())
        self._head = kv.address()

    def ask(self, trigger: Trigger) -> str:
        """Leave a request, ring the bell, and return the request's name."""
        name = new_name()
        asked = msgspec.structs.replace(trigger, run=self.run.id)
        kv.put(inbox.asked(self.run.id, name), msgspec.json.encode(asked))
        # Last: whoever hears it finds the request.
        kv.put(inbox.bell(self.run.id), name.encode())
        return name

    def standing(self, trigger: Trigger, view: View) -> str | None:
        """Return the name of a request with this content that is not over, taken or not."""
        if (name := view.standing(trigger)) is not None:
            return name
        prefix = inbox.asked(self.run.id)
        for key in kv.keys(prefix):
            with contextlib.suppress(msgspec.MsgspecError):
                asked = msgspec.json.decode(kv.get(key) or b"", type=Trigger)
                if trigger_view.same(msgspec.to_builtins(asked), trigger):
                    return key.removeprefix(prefix)
        return None

    def pending(self, name: str) -> bool:
        """Return whether nobody has taken the request from Ray's store.

        Raises:
            Lost: There is no cluster any more.
        """
        self._check()
        return kv.get(inbox.asked(self.run.id, name)) is not None

    def look(self, steps: Sequence[int] = ()) -> list[View]:
        """Return the run as it is now, on the node that counts its steps, then on the others if there are steps.

        Raises:
            Gone: That node has gone, or does not answer.
            Lost: There is no cluster any more.
        """
        self._check()
        alive = {node["NodeID"] for node in self._ray.nodes() if node["Alive"]}
        if not alive:  # while a cluster ends, its nodes leave before its head does
            raise Lost("the run has ended, or its cluster: none of its nodes is there any more")
        if self.run.node not in alive:
            raise Gone(f"the node of the run's trainer, {self.run.host}, has gone")
        nodes = [self.run.node, *sorted(alive - {self.run.node})] if steps else [self.run.node]
        calls = [self._call(node, steps) for node in nodes]
        done, late = self._ray.wait(calls, num_returns=len(calls), timeout=connect._PATIENCE_S)
        for call in late:
            self._ray.cancel(call)
        views = []
        for node, call in zip(nodes, calls, strict=True):
            try:
                views.append(trigger_view.view(self._ray.get(call) if call in done else {}))
            except Exception as error:  # a node that has gone meanwhile
                if node == self.run.node:
                    why = f"{type(error).__name__}" if call in done else f"no answer within {connect._PATIENCE_S:g} s"
                    raise Gone(f"the node of the run's trainer, {self.run.host}, can't be asked: {why}") from None
        return [view for place, view in enumerate(views) if place == 0 or view.info]

    def _check(self) -> None:
        try:
            connect._reach(self._head)
        except OSError:
            raise Lost("the run has ended, or its cluster: Ray's head is not there any more") from None

    def _call(self, node: str, steps: Sequence[int]) -> Any:
        task = tasks.on_node(self._task, node, "autoprof_look")
        return task.remote(self.run.directory, list(steps), self.run.pid, self.run.ticks)


def _there(found: Sequence[Registered]) -> str:
    return f"there are {runs.with_users({run.id: run.uid for run in found[-5:]})}"
