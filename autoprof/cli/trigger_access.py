"""Access of `autoprof trigger` to a run: the requests and the folders of steps, here or on the nodes of a cluster."""

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
from autoprof.rundir import layout, runs
from autoprof.rundir.file_names import MERGING, META, PART, RUN, STEP
from autoprof.rundir.layout import RunDir
from autoprof.rundir.records import RunFile
from autoprof.rundir.runs import Run
from autoprof.windows import requests
from autoprof.windows.requests import Became, Registered, Trigger


class Contents(msgspec.Struct, frozen=True):
    """The content of one step's folder on one host.

    Attributes:
        folder: The path of the folder.
        captures: dict from the name of each capture with a meta file to its state, its reason and its bytes.
        unfinished: dict from the name of each part that is being written to its bytes, the time of its last change, and
            True if the part is a folder.
    """

    folder: str
    captures: dict[str, tuple[str, str, int]]
    unfinished: dict[str, tuple[int, float, bool]]


class View(msgspec.Struct, frozen=True):
    """The content of a run's directory on one host.

    Attributes:
        host: The name of the host.
        info: The content of `run.json`; empty if there is no such file.
        alive: True if the run is running. In a cluster, this means the process that counts the steps.
        off: True if autoprof is switched off in the run.
        requests: The fields of each request and its state, by the name of the request's file.
        steps: The folders of the steps that were asked about, by step. Steps without a folder are missing.
    """

    host: str
    info: dict[str, Any]
    alive: bool
    off: bool
    requests: dict[str, dict[str, Any]]
    steps: dict[int, Contents]

    def became(self, name: str) -> Became | None:
        """Return the state of the request with this name. Return None if the trainer has not taken the request."""
        return _became(self.requests.get(f"{name}{requests.TAKEN}"))

    def open_request(self, trigger: Trigger) -> str | None:
        """Return the name of a request that is equal to `trigger` and not over. Return None if no request is."""
        for name, content in sorted(self.requests.items()):
            fields = {key: value for key, value in content.items() if key != "became"}
            became = _became(content) if name.endswith(requests.TAKEN) else None
            if (became is None or not became.over) and same(fields, trigger):
                return name.removesuffix(requests.TAKEN)
        return None


class RunAccess(Protocol):
    """Access to a run and its requests.

    Attributes:
        id: Id of the run.
        title: Description of the run for messages.
        control: Path of the run's folder `control/`, which contains the requests.
        ended: Reason why a run that is not alive counts as ended, for a message.
        pause_s: Seconds to wait between two calls of `look`.
    """

    id: str
    title: str
    control: str
    ended: str
    pause_s: float

    def look(self, steps: Sequence[int] = ()) -> list[View]:
        """Return the current views of the run. The first view is from the node that counts the steps.

        If `steps` is given, also return the views of the other nodes. They contain the folders of these steps.

        Raises:
            Gone: The run can no longer be reached.
        """

    def ask(self, trigger: Trigger) -> str:
        """Write a request into `control/`, and return its name.

        Raises:
            OSError: The file can't be written.
            Gone: The run can no longer be reached.
        """

    def switch(self, off: bool) -> None:
        """Switch autoprof off in the run, or on again. Raises the same errors as `ask`."""


class OnDisk:
    """Access to a run whose directory is on a disk of this host."""

    pause_s = 0.3

    def __init__(self, run: Run) -> None:
        self.id = run.id
        self.title = f"run {run.id}"
        self.ended = f"its state is {run.state}"
        self._directory = RunDir(Path(run.path))
        self.control = str(self._directory.control)

    def look(self, steps: Sequence[int] = ()) -> list[View]:
        path = self._directory.path
        current = view(reader()(str(path), list(steps)))
        info = layout.read_json(path / RUN, RunFile)
        return [msgspec.structs.replace(current, alive=runs.state(info, path) == "running")]

    def ask(self, trigger: Trigger) -> str:
        return requests.ask(self._directory, trigger).name

    def switch(self, off: bool) -> None:
        requests.switch(self._directory, off)


def view(answer: Mapping[str, Any]) -> View:
    """Convert the answer of a `reader` to a View."""
    return msgspec.convert(answer, View)


def reader() -> Callable[..., dict[str, Any]]:
    """Return a function that reads a run's directory.

    The function is a closure that uses the standard library only. Therefore Ray can send it by value to nodes without
    autoprof.
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
                    status = os.fstat(file.fileno())
                    readable = stat.S_ISREG(status.st_mode) and status.st_size < 1 << 24
                    content = json.loads(file.read()) if readable else {}
            except (OSError, ValueError, RecursionError):
                return {}
            return content if isinstance(content, dict) else {}

        def names_in(path: str) -> list[str]:
            try:
                return sorted(os.listdir(path))
            except OSError:
                return []

        def written(path: str) -> tuple[int, float, bool]:
            try:
                status = os.stat(path)
            except OSError:  # the part was renamed to its final name
                return 0, 0.0, False
            return status.st_size, status.st_mtime, stat.S_ISDIR(status.st_mode)

        def is_running() -> bool:
            try:
                with open(f"/proc/{pid}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
                return fields[0] not in (b"Z", b"X") and ticks in (0, int(fields[19]))
            except (OSError, ValueError, IndexError):
                return False

        def contents(folder: str) -> dict[str, Any]:
            captures, unfinished = {}, {}
            for name in names_in(folder):
                if name.endswith(meta_ending):
                    meta = load(os.path.join(folder, name))
                    state, reason = str(meta.get("state", "unfinished")), str(meta.get("reason") or "")
                    size = meta.get("bytes")
                    size = size if isinstance(size, int) and 0 <= size < 1 << 62 else 0
                    captures[name.removesuffix(meta_ending)] = state, reason, size
                elif name.endswith(part) and not name.startswith(merging):
                    unfinished[name] = written(os.path.join(folder, name))
            return {"folder": folder, "captures": captures, "unfinished": unfinished}

        control = os.path.join(directory, "control")
        control_names = names_in(control)
        folders = {step: os.path.join(directory, f"{step_folder}{step:06d}") for step in steps}
        return {
            "host": socket.gethostname(),
            "info": load(os.path.join(directory, run_file)),
            "alive": is_running(),
            "off": "off" in control_names,
            "requests": {
                name: load(os.path.join(control, name))
                for name in control_names
                if name.endswith((".json", ".json.taken"))
            },
            "steps": {step: contents(folder) for step, folder in folders.items() if os.path.isdir(folder)},
        }

    return autoprof_look


def writer() -> Callable[..., tuple[int, str, str] | None]:
    """Return a function that writes a file into a run's `control/`. Ray can send it by value, as in `reader`."""

    def autoprof_write(directory: str, name: str, content: bytes) -> tuple[int, str, str] | None:
        """Write a file, which appears once it is complete. If `content` is empty, remove the file.

        Return the number, the text and the folder of an error, or None.
        """
        import os

        control = os.path.join(directory, "control")
        part = os.path.join(control, f"{name}.{os.urandom(4).hex()}.part")
        try:
            if content:
                group = os.stat(directory).st_mode & 0o040
                os.makedirs(control, 0o750 if group else 0o700, exist_ok=True)
                with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                    os.fchmod(file.fileno(), 0o640 if group else 0o600)
                    file.write(content)
                os.replace(part, os.path.join(control, name))
            elif os.path.lexists(os.path.join(control, name)):
                os.unlink(os.path.join(control, name))
        except OSError as error:
            if os.path.lexists(part):
                os.unlink(part)
            return error.errno or 0, error.strerror or str(error), control
        return None

    return autoprof_write


def _became(content: Mapping[str, Any] | None) -> Became | None:
    if content is None:
        return None
    try:
        return msgspec.convert(content.get("became", {}), Became)
    except (msgspec.ValidationError, ValueError):  # ValueError: the text is not valid UTF-8
        return Became()


def same(fields: Mapping[str, Any], trigger: Trigger) -> bool:
    """Return True if a request with these JSON fields is equal to `trigger`. The runs that they name may differ."""
    try:
        request = requests.checked(msgspec.convert(fields, Trigger))
    except requests.UNREADABLE:
        return False
    return msgspec.structs.replace(request, run=trigger.run) == trigger


def find_in_ray(ray: Any, name: str) -> InRay:
    """Return the run called `name`: an id, the beginning of an id, or `latest` for this user's latest running run.

    Raises:
        NotFound: No run matches, or several do.
    """
    registered_runs = []
    for entry in cluster.entries(requests.registered("")).values():
        with contextlib.suppress(msgspec.MsgspecError):
            registered_runs.append(msgspec.json.decode(entry, type=Registered))
    registered_runs.sort(key=lambda run: run.started)
    if name == "latest":
        for run in reversed(registered_runs):
            if not runs.own(run.uid):
                continue
            access = InRay(ray, run)
            with contextlib.suppress(Gone):
                if access.look()[0].alive:
                    return access
        user = identity.user_name(os.geteuid())
        raise runs.NotFound(f"no run of user {user} is running in this cluster; {_listed(registered_runs)}")
    matching_runs = [run for run in registered_runs if run.id.startswith(name)]
    if len(matching_runs) != 1:
        problem = "several runs match" if matching_runs else "no run matches"
        raise runs.NotFound(f"{problem} {name!r} in this cluster; {_listed(matching_runs or registered_runs)}")
    return InRay(ray, matching_runs[0])


class InRay:
    """Access to a run in a Ray cluster, through small tasks on its nodes.

    Attributes:
        run: The entry of the run, which the process that counts the steps registered in the cluster.
    """

    ended = "its trainer's process has ended"
    # Longer than on a disk, because each look starts tasks of Ray.
    pause_s = 1.0

    def __init__(self, ray: Any, run: Registered) -> None:
        self.run = run
        self.id = run.id
        self.title = f"run {run.id} on {run.host}"
        self.control = os.path.join(run.directory, "control")
        self._ray = ray
        self._task = ray.remote(reader())
        self._head = cluster.own_address()

    def ask(self, trigger: Trigger) -> str:
        """Write a request into `control/` on the node that counts the steps, and return the request's name."""
        name = requests.new_name()
        self._write(name, msgspec.json.encode(msgspec.structs.replace(trigger, run=self.id)))
        return name

    def switch(self, off: bool) -> None:
        self._write(layout.OFF, b'{"off": true}' if off else b"")

    def _write(self, name: str, content: bytes) -> None:
        self._check()
        task = cluster.on_node(self._ray.remote(writer()), self.run.node, "autoprof_trigger")
        call = task.remote(self.run.directory, name, content)
        problem = self._answer(call)
        if problem is not None:
            raise OSError(*problem)

    def _answer(self, call: Any) -> Any:
        """Return the result of a call on a node.

        Raises:
            Gone: The node does not answer, or the call failed.
        """
        try:
            return self._ray.get(call, timeout=cluster._PATIENCE_S)
        except Exception as error:
            self._ray.cancel(call)
            raise self._unreachable(type(error).__name__) from None

    def look(self, steps: Sequence[int] = ()) -> list[View]:
        """Return the current views of the run. The first view is from the node that counts the steps.

        If `steps` is given, also return the views of the other nodes. They contain the folders of these steps.

        Raises:
            Gone: The node that counts the steps is gone or does not answer.
            Lost: The cluster is gone.
        """
        self._check()
        alive = {node["NodeID"] for node in self._ray.nodes() if node["Alive"]}
        if not alive:  # when a cluster ends, its nodes leave before its head
            raise Lost("the run has ended, or its cluster: all nodes are gone")
        if self.run.node not in alive:
            raise Gone(f"the node of the run's trainer, {self.run.host}, is gone")
        nodes = [self.run.node, *sorted(alive - {self.run.node})] if steps else [self.run.node]
        calls = [self._call(node, steps) for node in nodes]
        done_calls, late_calls = self._ray.wait(calls, num_returns=len(calls), timeout=cluster._PATIENCE_S)
        for call in late_calls:
            self._ray.cancel(call)
        if calls[0] in late_calls:
            raise self._unreachable(f"no answer within {cluster._PATIENCE_S:g} s")
        views = []
        for call in (call for call in calls if call in done_calls):
            try:
                views.append(view(self._answer(call)))
            except Gone:  # another node has died since
                if call == calls[0]:
                    raise
        return [view for index, view in enumerate(views) if index == 0 or view.info]

    def _unreachable(self, reason: str) -> Gone:
        return Gone(f"the node of the run's trainer, {self.run.host}, can't be asked: {reason}")

    def _check(self) -> None:
        try:
            cluster._reach(self._head)
        except OSError:
            raise Lost("the run has ended, or its cluster: Ray's head is gone") from None

    def _call(self, node: str, steps: Sequence[int]) -> Any:
        task = cluster.on_node(self._task, node, "autoprof_look")
        return task.remote(self.run.directory, list(steps), self.run.pid, self.run.ticks)


def _listed(registered: Sequence[Registered]) -> str:
    return f"there are {runs.with_users({run.id: run.uid for run in registered[-5:]})}"
