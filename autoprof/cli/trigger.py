"""`autoprof trigger`: opens a window in a running run, or switches autoprof on or off in it.

The requests and the folders of steps are on a disk of this host (`OnDisk`), or on the nodes of a Ray cluster (`InRay`).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from autoprof.base import identity, units
from autoprof.base.redact import plain
from autoprof.cli import arguments, console, nodes
from autoprof.cli.console import complain
from autoprof.cli.documents import Folder, Triggered
from autoprof.config.settings import WINDOW_FIELDS
from autoprof.run import cluster
from autoprof.run.cluster import Gone, Lost
from autoprof.rundir import layout, runs
from autoprof.rundir.file_names import RUN
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
        content = self.requests.get(f"{name}{requests.TAKEN}")
        if content is None:
            return None
        try:
            return msgspec.convert(content.get("became", {}), Became)
        except (msgspec.ValidationError, ValueError):  # ValueError: the text is not valid UTF-8
            return Became()

    def open_request(self, trigger: Trigger) -> str | None:
        """Return the name of a request that is equal to `trigger` and not over. Return None if no request is."""
        for file, content in sorted(self.requests.items()):
            name = file.removesuffix(requests.TAKEN)
            became = self.became(name) if name != file else None
            if became is not None and became.over:
                continue
            fields = {key: value for key, value in content.items() if key != "became"}
            try:
                request = requests.checked(msgspec.convert(fields, Trigger))
            except requests.UNREADABLE:
                continue
            if msgspec.structs.replace(request, run=trigger.run) == trigger:
                return name
        return None


class OnDisk:
    """Access to a run whose directory is on a disk of this host.

    Attributes:
        id: Id of the run.
        title: Description of the run for messages.
        control: Path of the run's folder `control/`, which contains the requests.
        ended: Reason why a run that is not alive counts as ended, for a message.
        pause_s: Seconds to wait between two calls of `look`.
    """

    pause_s = 0.3

    def __init__(self, run: Run) -> None:
        self.id = run.id
        self.title = f"run {run.id}"
        self.ended = f"its state is {run.state}"
        self._directory = RunDir(Path(run.path))
        self.control = str(self._directory.control)

    def look(self, steps: Sequence[int] = ()) -> list[View]:
        """Return the current view of the run. If `steps` is given, it contains the folders of these steps."""
        path = self._directory.path
        current = msgspec.convert(nodes.look(str(path), list(steps)), View)
        info = layout.read_json(path / RUN, RunFile)
        return [msgspec.structs.replace(current, alive=runs.state(info, path) == "running")]

    def ask(self, trigger: Trigger) -> str:
        """Write a request into `control/`, and return its name. Raises OSError if the file can't be written."""
        return requests.ask(self._directory, trigger).name

    def switch(self, off: bool) -> None:
        """Switch autoprof off in the run, or on again. Raises OSError if the file can't be written."""
        requests.switch(self._directory, off)


class InRay:
    """Access to a run in a Ray cluster, through small tasks on its nodes.

    Each method raises Gone if the node of the trainer is gone or does not answer, and Lost if the cluster is gone.
    `OnDisk` describes the other attributes.

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
        self._task = cluster.shipped(ray, nodes.__name__)
        self._head = cluster.own_address()

    def ask(self, trigger: Trigger) -> str:
        """Write a request into `control/` on the node that counts the steps, and return the request's name.

        Raises OSError if the file can't be written.
        """
        name = requests.new_name()
        self._write(name, msgspec.json.encode(msgspec.structs.replace(trigger, run=self.id)))
        return name

    def switch(self, off: bool) -> None:
        """Switch autoprof off in the run, or on again. Raises OSError if the file can't be written."""
        self._write(layout.OFF, b'{"off": true}' if off else b"")

    def _write(self, name: str, content: bytes) -> None:
        self._check()
        calls = {self.run.node: ("write", self.run.directory, name, content)}
        problem = self._answers("autoprof_trigger", calls)[self.run.node]
        if problem is not None:
            raise OSError(*problem)

    def look(self, steps: Sequence[int] = ()) -> list[View]:
        """Return the current views of the run. The first view is from the node that counts the steps.

        If `steps` is given, also return the views of the other nodes. They contain the folders of these steps.
        """
        self._check()
        alive = {node["NodeID"] for node in self._ray.nodes() if node["Alive"]}
        if not alive:  # when a cluster ends, its nodes leave before its head
            raise Lost("the run has ended, or its cluster: all nodes are gone")
        if self.run.node not in alive:
            raise Gone(f"the node of the run's trainer, {self.run.host}, is gone")
        node_ids = [self.run.node, *sorted(alive - {self.run.node})] if steps else [self.run.node]
        call = ("look", self.run.directory, list(steps), self.run.pid, self.run.ticks)
        answers = self._answers("autoprof_look", dict.fromkeys(node_ids, call))
        views = [msgspec.convert(answer, View) for answer in answers.values() if not isinstance(answer, Exception)]
        return [view for index, view in enumerate(views) if index == 0 or view.info]

    def _answers(self, title: str, calls: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
        """Return the answers of nodes. The node of the trainer must have answered."""
        answers = ask_nodes(self._ray, self._task, title, calls, cluster.PATIENCE_S)
        answer = answers[self.run.node]
        if isinstance(answer, Exception):
            reason = str(answer) if isinstance(answer, TimeoutError) else type(answer).__name__
            raise Gone(f"the node of the run's trainer, {self.run.host}, can't be asked: {reason}")
        return answers

    def _check(self) -> None:
        try:
            cluster.check_connection(self._head)
        except OSError:
            raise Lost("the run has ended, or its cluster: Ray's head is gone") from None


RunAccess = OnDisk | InRay


def ask_nodes(ray: Any, task: Any, title: str, calls: dict[str, tuple[Any, ...]], timeout_s: float) -> dict[str, Any]:
    """Call functions of `nodes.py` on nodes of a cluster, at the same time.

    Args:
        ray: The module `ray`, connected to the cluster.
        task: The remote function that `cluster.shipped` returns for `nodes.py`. Each new one stays in Ray's tables.
        title: The name that Ray's tools show for the calls.
        calls: dict from a node's id to the name of the function and its arguments.
        timeout_s: Seconds to wait for the answers.

    Returns:
        dict from a node's id to its answer, or to the exception if the node has died or does not answer.
    """
    references = {node_id: cluster.on_node(task, node_id, title).remote(*call) for node_id, call in calls.items()}
    done, late = ray.wait(list(references.values()), num_returns=len(references), timeout=timeout_s)
    for reference in late:
        ray.cancel(reference)
    answers: dict[str, Any] = {}
    for node_id, reference in references.items():
        try:
            if reference not in done:
                raise TimeoutError(f"no answer within {timeout_s:g} s")
            answers[node_id] = ray.get(reference)
        except (ray.exceptions.RayError, ConnectionError, TimeoutError) as error:
            answers[node_id] = error
    return answers


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
            if not runs.belongs_to_this_user(run.uid):
                continue
            access = InRay(ray, run)
            with contextlib.suppress(Gone):
                if access.look()[0].alive:
                    return access
        user = identity.user_name(os.geteuid())
        raise runs.NotFound(f"no run of user {user} is running in this cluster; {_described_runs(registered_runs)}")
    matching_runs = [run for run in registered_runs if run.id.startswith(name)]
    if len(matching_runs) != 1:
        problem = "several runs match" if matching_runs else "no run matches"
        raise runs.NotFound(f"{problem} {name!r} in this cluster; {_described_runs(matching_runs or registered_runs)}")
    return InRay(ray, matching_runs[0])


def _described_runs(registered: Sequence[Registered]) -> str:
    return f"there are {runs.ids_with_users({run.id: run.uid for run in registered[-5:]})}"


# Seconds without a change after which a file counts as abandoned.
_FILE_S = 120.0
# Seconds after which a folder of torch_npu counts as abandoned. The analysis of the folder takes up to an hour, and may
# not change the folder meanwhile.
_FOLDER_S = 3700.0
# Seconds after which a file or folder counts as abandoned once the run has ended. Then only a process that outlived the
# run could still write.
_AFTER_S = 15.0
# Maximum number of consecutive looks that do not find the request: a listing may miss a file that is renamed meanwhile.
_MAX_LOOKS_WITHOUT_REQUEST = 10


class GaveUp(Exception):
    """The awaited traces will not be written. The message gives the reason."""


def wait_for_files(access: RunAccess, trigger: Trigger, document: Triggered, keep_stdout: bool = False) -> None:
    """Show the progress of a request until its traces are written, then print their folders.

    Args:
        access: The access to the run.
        trigger: The requested windows.
        document: The document for `--json`, to which the results are added.
        keep_stdout: True to print nothing to stdout.

    Raises:
        GaveUp: Some or all traces will not be written.
        Gone: The run can no longer be reached.
        KeyboardInterrupt: The user pressed Ctrl-C.
    """
    total = 0 if trigger.at else trigger.steps
    with console.lines(total, keep_stdout) as show:
        became = _wait_for_windows(access, document.request, show, total)
        views, abandoned = _wait_until_written(access, became.captured, show)
    folders = _folders(views)
    problems = list(_problems(folders, became.captured, abandoned))
    document.captured, document.problems, document.reason = became.captured, problems, became.reason
    document.folders = [
        Folder(
            step, host, contents.folder, len(contents.captures), sum(size for *_, size in contents.captures.values())
        )
        for step, hosts in folders.items()
        for host, contents in hosts
    ]
    if not keep_stdout:
        _print_folders(document, views[0].host)
    if became.reason:
        raise GaveUp(f"steps captured: {', '.join(map(str, became.captured)) or 'none'}; {became.reason}")
    if problems:
        raise GaveUp("not all captures are complete; see autoprof doctor RUN")


def _wait_for_windows(access: RunAccess, name: str, show: console.Show, total: int) -> Became:
    """Wait until all windows of the request have closed, and return the state of the request."""
    looks_without_request = 0
    while True:
        view = access.look()[0]
        became = view.became(name)
        if became is None:
            exists = name in view.requests
            looks_without_request = 0 if exists else looks_without_request + 1
            if looks_without_request > _MAX_LOOKS_WITHOUT_REQUEST:
                raise GaveUp("the request is gone: its file was removed")
            show("waiting for a step to begin" if exists else "taken", 0)
        elif became.state == "refused":
            raise GaveUp(f"the request was refused: {became.reason}")
        else:
            _show_progress(became, show, total)
            if became.over:
                return became
        if not view.alive:
            if became is not None and became.captured:
                became.reason = "the run has ended"
                return became
            raise GaveUp("the run has ended" + (" before the request was taken" if became is None else ""))
        if view.off:
            raise GaveUp("autoprof is switched off in the run; the request stays open, and --on resumes it")
        time.sleep(access.pause_s)


def _show_progress(became: Became, show: console.Show, total: int) -> None:
    """Show which steps are captured, and which step is being captured."""
    for count, step in enumerate(became.captured, 1):
        show(f"step {step} is captured{f' ({count} of {total})' if total > 1 else ''}", count)
    if became.going_on is not None:
        show(f"step {became.going_on} is being captured", len(became.captured))
    elif became.state == "taken":
        show("taken; waiting for its first step", 0)


def _wait_until_written(access: RunAccess, steps: Sequence[int], show: console.Show) -> tuple[list[View], list[str]]:
    """Wait until all files of the steps have their final names or are abandoned.

    Returns:
        The views of the run, and the paths of the abandoned files: they are not complete, but no longer change.
    """
    last_changes: dict[str, tuple[object, float]] = {}
    while True:
        views = access.look(steps)
        now = time.monotonic()
        unfinished = {
            f"{contents.folder}/{name}": state
            for view in views
            for contents in view.steps.values()
            for name, state in contents.unfinished.items()
        }
        growing_paths = []
        for path, state in unfinished.items():
            unchanged_since = last_changes[path][1] if path in last_changes and last_changes[path][0] == state else now
            last_changes[path] = state, unchanged_since
            patience_s = (_FOLDER_S if state[2] else _FILE_S) if views[0].alive else _AFTER_S
            if now - unchanged_since < patience_s:
                growing_paths.append(path)
        if not growing_paths:
            return views, sorted(unfinished)
        show(f"files that are still being written: {len(growing_paths)}", len(steps))
        time.sleep(access.pause_s)


def _folders(views: Sequence[View]) -> dict[int, list[tuple[str, Contents]]]:
    """Return the capture folders of each step, with their contents.

    The result is a dict from step to a list of pairs: a host, and the contents of the folder that this host sees.

    A folder that several hosts share appears once. Two hosts share a folder if they see the same captures, because the
    name of a capture contains its host.
    """
    folders: dict[int, list[tuple[str, Contents]]] = {}
    for view in views:
        for step, contents in sorted(view.steps.items()):
            step_folders = folders.setdefault(step, [])
            names = contents.captures.keys()
            if not step_folders or (names and all(names != other.captures.keys() for _, other in step_folders)):
                step_folders.append((view.host, contents))
    return folders


def _problems(
    folders: dict[int, list[tuple[str, Contents]]], steps: Sequence[int], abandoned: Sequence[str]
) -> Iterator[str]:
    if steps and not any(contents.captures for hosts in folders.values() for _, contents in hosts):
        yield "none of the steps has a capture"
    for step, hosts in folders.items():
        for _, contents in hosts:
            for name, (state, reason, _) in contents.captures.items():
                if state != "complete":
                    yield f"step {step}, {name}: {state}{f', {reason}' if reason else ''}"
    for path in abandoned:
        yield f"{path}: it is incomplete and no longer grows"


def _print_folders(document: Triggered, trainer_host: str) -> None:
    """Print the problems, the number of captures, and the folders.

    If a host other than `trainer_host` has a folder, print the host of each folder.
    """
    for problem in document.problems:
        print(plain(problem), flush=True)
    count, size = (sum(getattr(folder, name) for folder in document.folders) for name in ("captures", "bytes"))
    print(f"captures: {count}, {units.size(size)}", flush=True)
    has_other_hosts = any(folder.host != trainer_host for folder in document.folders)
    for folder in document.folders:
        print(plain(f"{folder.host}:{folder.path}" if has_other_hosts else folder.path), flush=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    arguments.add_run(parser)
    parser.add_argument("--steps", type=int, default=1, metavar="N", help="number of steps (default: 1)")
    parser.add_argument("--from", type=int, dest="since", metavar="M", help="first step (default: the next one)")
    parser.add_argument(
        "--at", default="", metavar="STEPS", help="steps, instead of --steps and --from: 12,15 or 20:24 or ::50"
    )
    for option in WINDOW_FIELDS:
        name = option.replace("_", "-")
        parser.add_argument(f"--{name}", metavar="VALUE", help=f"{arguments.SETTINGS[name]}; for this window")
    parser.add_argument(
        "--wait", action="store_true", help="wait until the traces are complete, then print their folders"
    )
    parser.add_argument(
        "--ray", metavar="ADDRESS", help="send the request through Ray: auto, or an address as ray.init takes it"
    )
    switch = parser.add_mutually_exclusive_group()
    switch.add_argument("--off", action="store_true", help="switch autoprof off in the run, from the next step on")
    switch.add_argument("--on", action="store_true", help="switch autoprof on again")
    arguments.add_dir(parser)
    arguments.add_json(parser)


def run(parsed: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    window = {name: getattr(parsed, name) for name in WINDOW_FIELDS if getattr(parsed, name) is not None}
    trigger = requests.checked(Trigger(steps=parsed.steps, since=parsed.since, at=parsed.at, overrides=window))
    switch: Literal["", "off", "on"] = "off" if parsed.off else "on" if parsed.on else ""
    if switch and (parsed.wait or trigger != Trigger()):
        return complain(
            f"trigger: --{switch} switches the whole run; it can't be combined with --wait or options of a window", 2
        )
    try:
        if parsed.ray is None:
            return _send(OnDisk(arguments.find_run(parsed)), trigger, switch, parsed)
        with arguments.cluster(parsed.ray, "--ray") as ray:
            return _send(find_in_ray(ray, parsed.name), trigger, switch, parsed)
    except OSError as error:
        return complain(
            f"trigger: {error.filename}: {error.strerror}; only users who may write there can send requests", 1
        )
    except (Gone, cluster.Unreachable) as error:
        return arguments.complain_about_cluster("trigger", error)
    except GaveUp as error:
        return complain(f"trigger: {error}", 1)


def _print_line(text: str, parsed: argparse.Namespace) -> None:
    """Print a line to stdout. If `--json` is set, print it to stderr, because only the document goes to stdout."""
    print(text, file=sys.stderr if parsed.json else sys.stdout, flush=True)


def _print_document(document: Triggered, parsed: argparse.Namespace) -> int:
    """If `--json` is set, print the document. Return the exit status 0."""
    if parsed.json:
        console.print_json(document)
    return 0


def _send(access: RunAccess, trigger: Trigger, switch: str, parsed: argparse.Namespace) -> int:
    (view,) = access.look()
    if not view.alive:
        return complain(f"trigger: run {access.id} is not running: {access.ended}", 1)
    if switch:
        access.switch(switch == "off")
        _print_line(f"autoprof is switched {switch} in run {access.id} from the next step on", parsed)
        return _print_document(Triggered(run=access.id, off=switch == "off"), parsed)
    if parsed.wait and view.off:
        off = f"autoprof is switched off in run {access.id}, so no request was sent; switch it on first, with --on"
        return complain(f"trigger: {off}", 1)
    open_request = view.open_request(trigger)
    name = open_request or access.ask(trigger)
    path = os.path.join(access.control, name)
    if open_request:
        _print_line(f"{access.title} has been asked for {trigger} already, in {path}; using that request", parsed)
    else:
        _print_line(f"asked {access.title} for {trigger}, in {path}", parsed)
    document = Triggered(run=access.id, request=name, joined=bool(open_request), off=view.off)
    return _wait_if_asked(access, trigger, document, parsed)


def _wait_if_asked(access: RunAccess, trigger: Trigger, document: Triggered, parsed: argparse.Namespace) -> int:
    """If `--wait` is set, wait for the traces of the request. Return the exit status."""
    if not parsed.wait:
        _print_line(
            "a run reads requests when a step begins; a server without a trainer when a request arrives", parsed
        )
        if document.off:
            _print_line(
                "autoprof is switched off in the run: nothing is captured until it is switched on, with --on", parsed
            )
        return _print_document(document, parsed)
    try:
        wait_for_files(access, trigger, document, keep_stdout=parsed.json)
    except KeyboardInterrupt:
        text = "the request stays open; run the same command to wait for it again"
        print(file=sys.stderr)
        return complain(text, 130)
    except GaveUp as error:
        document.reason = document.reason or str(error)
        _print_document(document, parsed)
        raise
    return _print_document(document, parsed)
