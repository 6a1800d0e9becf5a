"""Views of a run for `autoprof trigger`: its requests and the folders of its steps, here or on a cluster's nodes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from autoprof.base import identity
from autoprof.run import cluster
from autoprof.run.cluster import Gone, Lost
from autoprof.rundir import decoder, runs
from autoprof.rundir.file_names import MERGING, META, PART, RUN, STEP
from autoprof.rundir.records import RunFile
from autoprof.rundir.runs import Run
from autoprof.windows import requests
from autoprof.windows.requests import Became, Registered, Trigger, new_name


class Contents(msgspec.Struct, frozen=True):
    """One step's folder on one host.

    Attributes:
        folder: Its path.
        captures: State, reason and bytes of captures that have a meta file, by name.
        unfinished: Bytes, time of the last change and whether it is a folder, of what is still being written, by name.
    """

    folder: str
    captures: dict[str, tuple[str, str, int]]
    unfinished: dict[str, tuple[int, float, bool]]


class View(msgspec.Struct, frozen=True):
    """A run's directory as one host has it.

    Attributes:
        host: The host.
        info: The content of `run.json`, empty where there is none.
        alive: Whether the process that was asked about runs there.
        off: Whether autoprof is switched off in the run.
        requests: The requests that are there, with what became of them, by name.
        steps: The folders of those steps that were asked about and are there.
    """

    host: str
    info: dict[str, Any]
    alive: bool
    off: bool
    requests: dict[str, dict[str, Any]]
    steps: dict[int, Contents]

    def became(self, name: str) -> Became | None:
        """Return the state of a request; None if nobody has taken it."""
        return _became(self.requests.get(f"{name}{requests.TAKEN}"))

    def standing(self, trigger: Trigger) -> str | None:
        """Return the name of a request with this content that is there and not over."""
        for name, content in sorted(self.requests.items()):
            fields = {key: value for key, value in content.items() if key != "became"}
            became = _became(content) if name.endswith(requests.TAKEN) else None
            if (became is None or not became.over) and same(fields, trigger):
                return name.removesuffix(requests.TAKEN)
        return None


class Place(Protocol):
    """Way to look at a run."""

    def look(self, steps: Sequence[int] = ()) -> list[View]:
        """Return the run as it is now: where its steps are counted, then on the other nodes, if there are steps.

        Raises:
            Gone: There is no way to it any more.
        """

    def pending(self, name: str) -> bool:
        """Return whether the request is on its way, where `look` does not show it."""


class OnDisk:
    """A run whose directory is on a disk of this host's."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def look(self, steps: Sequence[int] = ()) -> list[View]:
        path = Path(self._run.path)
        found = view(reader()(self._run.path, list(steps)))
        info = decoder.read(path / RUN, RunFile)
        return [msgspec.structs.replace(found, alive=runs.state(info, path) == "running")]

    def pending(self, name: str) -> bool:
        return False


def view(told: Mapping[str, Any]) -> View:
    """Convert the answer of a `reader`."""
    return msgspec.convert(told, View)


def reader() -> Callable[..., dict[str, Any]]:
    """Make the function that looks at a run's directory.

    It is made here, and of the standard library alone, so that it is shipped by value to nodes that have no autoprof.
    """
    run_file, meta_ending, part, merging, step_folder = RUN, META, PART, MERGING, STEP

    def autoprof_look(directory: str, steps: list[int], pid: int = 0, ticks: int = 0) -> dict[str, Any]:
        import json
        import os
        import socket
        import stat

        def load(path: str) -> dict[str, Any]:
            try:
                with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
                    found = os.fstat(file.fileno())
                    content = json.loads(file.read()) if stat.S_ISREG(found.st_mode) and found.st_size < 1 << 24 else {}
            except (OSError, ValueError, RecursionError):
                return {}
            return content if isinstance(content, dict) else {}

        def names(path: str) -> list[str]:
            try:
                return sorted(os.listdir(path))
            except OSError:
                return []

        def written(path: str) -> tuple[int, float, bool]:
            try:
                found = os.stat(path)
            except OSError:  # it has just got its final name
                return 0, 0.0, False
            return found.st_size, found.st_mtime, stat.S_ISDIR(found.st_mode)

        def runs() -> bool:
            try:
                with open(f"/proc/{pid}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
                return fields[0] not in (b"Z", b"X") and ticks in (0, int(fields[19]))
            except (OSError, ValueError, IndexError):
                return False

        def contents(folder: str) -> dict[str, Any]:
            captures, unfinished = {}, {}
            for name in names(folder):
                if name.endswith(meta_ending):
                    meta = load(os.path.join(folder, name))
                    told = str(meta.get("state", "unfinished")), str(meta.get("reason") or "")
                    size = meta.get("bytes")
                    size = size if isinstance(size, int) and 0 <= size < 1 << 62 else 0
                    captures[name.removesuffix(meta_ending)] = *told, size
                elif name.endswith(part) and not name.startswith(merging):
                    unfinished[name] = written(os.path.join(folder, name))
            return {"folder": folder, "captures": captures, "unfinished": unfinished}

        control = os.path.join(directory, "control")
        there = names(control)
        folders = {step: os.path.join(directory, f"{step_folder}{step:06d}") for step in steps}
        return {
            "host": socket.gethostname(),
            "info": load(os.path.join(directory, run_file)),
            "alive": runs(),
            "off": "off" in there,
            "requests": {
                name: load(os.path.join(control, name)) for name in there if name.endswith((".json", ".json.taken"))
            },
            "steps": {step: contents(folder) for step, folder in folders.items() if os.path.isdir(folder)},
        }

    return autoprof_look


def _became(content: Mapping[str, Any] | None) -> Became | None:
    if content is None:
        return None
    try:
        return msgspec.convert(content.get("became", {}), Became)
    except (msgspec.ValidationError, ValueError):  # ValueError: text that is no UTF-8
        return Became()


def same(fields: Mapping[str, Any], trigger: Trigger) -> bool:
    """Return whether the fields of a request, as JSON has them, ask for the same, of whichever run."""
    try:
        asked = requests.checked(msgspec.convert(fields, Trigger))
    except requests.UNREADABLE:
        return False
    return msgspec.structs.replace(asked, run=trigger.run) == trigger


def find_in_ray(ray: Any, name: str) -> InRay:
    """Find the run called `name`: an id, the beginning of one, or `latest`, the last of this user's running ones.

    Raises:
        NotFound: There is none, or several.
    """
    known = []
    for key in cluster.keys(requests.registered("")):
        with contextlib.suppress(msgspec.MsgspecError):
            known.append(msgspec.json.decode(cluster.get(key) or b"", type=Registered))
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
        self._task = ray.remote(reader())
        self._head = cluster.own_address()

    def ask(self, trigger: Trigger) -> str:
        """Leave a request, ring the bell, and return the request's name."""
        name = new_name()
        asked = msgspec.structs.replace(trigger, run=self.run.id)
        cluster.put(requests.asked(self.run.id, name), msgspec.json.encode(asked))
        # Last: whoever hears it finds the request.
        cluster.put(requests.bell(self.run.id), name.encode())
        return name

    def standing(self, trigger: Trigger, view: View) -> str | None:
        """Return the name of a request with this content that is not over, taken or not."""
        if (name := view.standing(trigger)) is not None:
            return name
        prefix = requests.asked(self.run.id)
        for key in cluster.keys(prefix):
            with contextlib.suppress(msgspec.MsgspecError):
                asked = msgspec.json.decode(cluster.get(key) or b"", type=Trigger)
                if same(msgspec.to_builtins(asked), trigger):
                    return key.removeprefix(prefix)
        return None

    def pending(self, name: str) -> bool:
        """Return whether nobody has taken the request from Ray's store.

        Raises:
            Lost: There is no cluster any more.
        """
        self._check()
        return cluster.get(requests.asked(self.run.id, name)) is not None

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
        done, late = self._ray.wait(calls, num_returns=len(calls), timeout=cluster._PATIENCE_S)
        for call in late:
            self._ray.cancel(call)
        views = []
        for node, call in zip(nodes, calls, strict=True):
            try:
                views.append(view(self._ray.get(call) if call in done else {}))
            except Exception as error:  # a node that has gone meanwhile
                if node == self.run.node:
                    why = f"{type(error).__name__}" if call in done else f"no answer within {cluster._PATIENCE_S:g} s"
                    raise Gone(f"the node of the run's trainer, {self.run.host}, can't be asked: {why}") from None
        return [view for place, view in enumerate(views) if place == 0 or view.info]

    def _check(self) -> None:
        try:
            cluster._reach(self._head)
        except OSError:
            raise Lost("the run has ended, or its cluster: Ray's head is not there any more") from None

    def _call(self, node: str, steps: Sequence[int]) -> Any:
        task = cluster.on_node(self._task, node, "autoprof_look")
        return task.remote(self.run.directory, list(steps), self.run.pid, self.run.ticks)


def _there(found: Sequence[Registered]) -> str:
    return f"there are {runs.with_users({run.id: run.uid for run in found[-5:]})}"
