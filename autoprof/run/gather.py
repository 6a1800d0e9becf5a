"""Collection of the files of a run from all nodes of a cluster into one run directory.

The files of the run on one node are called the node's part of the run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from autoprof.base import files, identity, log
from autoprof.base.identity import host_name
from autoprof.base.originals import fcntl, os, time
from autoprof.base.redact import hidden_in
from autoprof.run import cluster
from autoprof.run.cluster import Node
from autoprof.run.fetch import CHANGED, DIED, Fetcher, File, Index, NodeLost, RayNode, is_safe
from autoprof.rundir import layout, processes, runs
from autoprof.rundir.file_names import COLLECTED, COLLECTING, META, PART, RAW_ENDINGS, RUN, TRACE
from autoprof.rundir.layout import RunDir
from autoprof.rundir.records import CollectedFile, Missing, NodeState, RunFile


class NodePart(msgspec.Struct, kw_only=True):
    """A node's part of a run: the answer of `look` in `node_functions.py`.

    Attributes:
        node: Ray's id of the node.
        directory: The path of the run directory on the node.
        host: The host name of the node.
        autoprof: True if autoprof is installed on the node.
        state: `there`, `absent` or `unreadable`, from the answer. `no answer` if the node does not answer.
        reason: The reason why the part is unreadable or the node does not answer.
        same: True if the run directory on the node is on the same disk as the run directory here.
        disk: The identity of the run directory on the node, as in `cluster.disk_of`.
        files: The complete files.
        unfinished: The incomplete files: for each, the path and the seconds since the last change.
        left_out: The paths that are not collected, each with the reason.
    """

    node: str
    directory: str
    host: str
    autoprof: bool = True
    state: str = "there"
    reason: str = ""
    same: bool = False
    disk: str = ""
    files: list[File] = []
    unfinished: list[tuple[str, float]] = []
    left_out: list[tuple[str, str]] = []

    def state_of(self, state: str, fetched: int = 0) -> NodeState:
        """Return the record of this node for `collected.json`.

        Args:
            state: The state of the node, as in `NodeState`.
            fetched: The number of bytes that were fetched from the node.
        """
        return NodeState(
            id=self.node,
            host=self.host,
            state=state,
            directory=self.directory,
            files=len(self.files),
            bytes=sum(file.size for file in self.files),
            fetched=fetched,
        )

    def missing(self, path: str, reason: str) -> Missing:
        """Return the record of a file of this part that was not collected. An empty `path` means the whole part."""
        return Missing(self.node, self.host, path, reason)

    @property
    def final_state(self) -> str:
        """Return the state of the node, as in `NodeState`, if no files have to be fetched from the node.

        Otherwise return an empty text.
        """
        if self.state == "absent":
            return "nothing" if self.autoprof else "no autoprof"
        return self.state if self.state != "there" else "here" if self.same else ""


_MAX_NAMED = 3


def warn_missing(missing: list[Missing], then: str) -> None:
    """Log a warning about files that were not collected. `then` is advice for the user, at the end of the warning."""
    if missing:
        file_list = "; ".join(entry.line for entry in missing[:_MAX_NAMED])
        more_text = f"; and {len(missing) - _MAX_NAMED} more" if len(missing) > _MAX_NAMED else ""
        log.warning(f"collecting is not complete: {file_list}{more_text}; {then}")


# If a file has not changed for this time, no process is writing it any more.
_FRESH_S = 10.0
_PAUSE_S = 0.5
NEVER = float("inf")
_BUSY = "another process is collecting this run; try again when it has ended"

Progress = Callable[[int], object]


class Busy(Exception):
    """Another process is collecting this run."""


class Gathering:
    """One collection of the files of one run.

    Attributes:
        run: The run directory here.
        registered: Dict from Ray's id of a node to the node, for the nodes that have registered with the run.
        alive: Dict from Ray's id of a node to its host name, for the live nodes of the cluster.
        sources: Dict from Ray's id of a live node to the object that calls functions on the node.
        deadline: The time at which all calls end, by `time.monotonic`.
    """

    def __init__(
        self,
        run: Path,
        registered: Sequence[Node],
        alive: Mapping[str, str],
        source: Callable[[str], RayNode],
        deadline: float = NEVER,
    ) -> None:
        self.run = run
        self.registered = {node.id: node for node in registered}
        self.alive = alive
        self.sources = {node: source(node) for node in alive}
        self.deadline = deadline
        self._driver = next((node for node in registered if node.driver), None)
        self._missing: list[Missing] = []
        self._left_out: list[Missing] = []

    def gather(
        self, wait: bool, progress: Callable[[int], contextlib.AbstractContextManager[Progress]]
    ) -> CollectedFile:
        """Fetch the parts of all nodes, and return the result.

        Args:
            wait: True to wait until no process of the run is writing files on any node, at most until the deadline.
            progress: Function that makes a progress bar for a total number of bytes.

        Raises:
            Busy: Another process is collecting this run.
            OSError: A file can't be written here.
        """
        files.folder(self.run, run_folder_count=2)
        files.folder(self.run / COLLECTING)
        with self._lock(), self._mark() as mark:
            for part_file in (self.run / COLLECTING).glob(f"*{PART}"):  # from a collection that was killed
                files.remove(str(part_file))
            parts = self._find_parts(mark, wait)
            index = Index(self.run)
            states = [part.state_of(part.final_state) for part in parts if part.final_state]
            remote_parts = self._distinct(parts)
            with progress(sum(file.size for part in remote_parts for file in part.files)) as done:
                states += [self._fetch_node(part, index, done) for part in remote_parts]
            states += self._dead(parts, index)
        return CollectedFile(
            run=self.run.name,
            directory=str(self.run),
            nodes=sorted(states, key=lambda node: (node.host, node.id)),
            missing=self._missing,
            left_out=self._left_out,
        )

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        lock = files.descriptor(self.run / COLLECTING / "lock", flags, held=True)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Busy(_BUSY) from None
        except OSError:  # a file system without locks
            pass
        try:
            yield
        finally:
            os.close(lock)

    @contextlib.contextmanager
    def _mark(self) -> Iterator[str]:
        """Make a file in the run directory, and yield its path. Remove the file when the `with` block ends.

        A node that finds the file in its run directory has the same disk.
        """
        name = f"here-{os.urandom(8).hex()}"
        files.write(self.run / COLLECTING / name, b"")
        try:
            yield f"{COLLECTING}/{name}"
        finally:
            files.remove(str(self.run / COLLECTING / name))

    def _find_parts(self, mark: str, wait: bool) -> list[NodePart]:
        """Return the parts of all nodes.

        All nodes are asked at the same time, because Ray may have to start a worker on each node. If `wait` is true,
        ask again until no process is writing files.
        """
        while True:
            calls = {node: self.sources[node].ask("look", self._directory(node), mark) for node in self.alive}
            parts = [self._part(node, call) for node, call in calls.items()]
            writing = any(abs(age) < _FRESH_S for part in parts for _, age in part.unfinished)
            if not wait or not writing or time.monotonic() > self.deadline:
                return parts
            time.sleep(_PAUSE_S)

    def _directory(self, node: str) -> str:
        registered = self.registered.get(node) or self._driver
        return registered.directory if registered else str(self.run)

    def _part(self, node: str, call: Any) -> NodePart:
        part = NodePart(node=node, directory=self._directory(node), host=host_name(self.alive[node]))
        try:
            answer = self.sources[node].answer(call)
            part = msgspec.convert({**answer, "node": node, "directory": part.directory}, NodePart)
            part.host = host_name(part.host)
            return part
        except NodeLost as error:
            part.state, part.reason = "no answer", str(error)
        except (TypeError, msgspec.ValidationError) as error:
            part.state, part.reason = "no answer", f"its answer can't be understood: {error}"
        self._missing.append(part.missing("", part.reason))
        return part

    def _distinct(self, parts: Sequence[NodePart]) -> list[NodePart]:
        """Return the parts to fetch: those on other disks than the run directory here, and only one for each disk.

        Several nodes may have the same disk, because several nodes may be on one machine.
        """
        seen_disks = {cluster.disk_of(str(self.run))}
        distinct = []
        for part in sorted(parts, key=lambda part: part.node not in self.registered):
            if part.state == "unreadable":
                self._missing.append(part.missing("", f"{part.directory} can't be read there: {part.reason}"))
            if not part.final_state and part.disk not in seen_disks:
                seen_disks.add(part.disk)
                distinct.append(part)
        return distinct

    def _fetch_node(self, part: NodePart, index: Index, progress: Progress) -> NodeState:
        """Fetch the files of a node that are missing or outdated here. Return the record for `collected.json`."""
        fetcher = Fetcher(self.run, part.node, part.directory, self.sources[part.node], index, progress)
        missing_before, fetched = len(self._missing), 0
        self._left_out += [part.missing(path, reason) for path, reason in part.left_out]
        for path in _captures(path for path, _ in part.unfinished):
            self._missing.append(part.missing(path, "it is being written, or was when its process died (.part)"))
        try:
            for file, problem in self._fetch_files(part, fetcher):
                fetched += file.size if not problem else 0
                if problem:
                    self._missing.append(part.missing(file.path, problem))
        except NodeLost as error:
            lacking = sum(not fetcher.is_here(file) for file in part.files)
            problem = f"{error}; {lacking} of its {len(part.files)} files are missing or outdated here"
            self._missing.append(part.missing("", problem))
        except (TypeError, ValueError) as error:
            self._missing.append(part.missing("", f"its answer can't be understood: {error}"))
        return part.state_of("collected" if len(self._missing) == missing_before else "incomplete", fetched)

    def _fetch_files(self, part: NodePart, fetcher: Fetcher) -> Iterator[tuple[File, str]]:
        """Fetch the outdated files of a part, and yield each file with the problem, or with an empty text.

        If a file changed while it was read, fetch it a second time.
        """
        changed_paths = set()
        for file, problem in fetcher.fetch(fetcher.outdated(self._files_to_have(part))):
            if problem == CHANGED:
                changed_paths.add(file.path)
            else:
                yield file, problem
        if changed_paths:
            source = self.sources[part.node]
            current_part = self._part(part.node, source.ask("look", part.directory, ""))
            yield from fetcher.fetch([file for file in current_part.files if file.path in changed_paths])

    def _files_to_have(self, part: NodePart) -> list[File]:
        """Return the files of a part that should be in the run directory here.

        Each part has a `run.json`, written by the first process on its node. Only the `run.json` on the driver's node
        has the result of the run, so it replaces the `run.json` here. Another one is fetched if no `run.json` is here.
        """
        is_driver = self._driver is not None and self._driver.id == part.node
        wanted_files = []
        for file in part.files:
            if not is_safe(file.path):
                self._left_out.append(part.missing(file.path, "its path leads out of the run directory"))
            elif file.path != RUN or is_driver or not os.path.lexists(self.run / RUN):
                wanted_files.append(file)
        return wanted_files

    def _dead(self, parts: Sequence[NodePart], index: Index) -> list[NodeState]:
        """Return the records of the dead nodes of the run whose files are lost.

        Omit a dead node if its processes wrote into the run directory here, or if a live node has the same disk.
        """
        disks = {cluster.disk_of(str(self.run)), *(part.disk for part in parts)} - {""}
        dead_nodes = [node for node in self.registered.values() if node.id not in self.alive and node.disk not in disks]
        local_states = processes.read(self.run) if dead_nodes else []
        # The nodes whose processes wrote directly into the run directory here.
        writers = {state.node for state in local_states if state.file not in index.nodes}
        states = []
        for node in dead_nodes:
            if node.id in writers:
                continue
            collected_count = sum(owner == node.id for owner in index.nodes.values())
            collected = f"; {collected_count} of them were collected before" if collected_count else ""
            problem = f"{DIED}, and its files in {node.directory} are lost{collected}"
            self._missing.append(Missing(node.id, node.host, "", problem))
            states.append(NodeState(id=node.id, host=node.host, state="dead", directory=node.directory))
        return states


def _captures(unfinished: Iterator[str]) -> list[str]:
    """Return the paths of unfinished captures, without endings and sorted.

    A capture may have several files that end in `.part`, but the result contains each capture only once.
    """
    endings = [*(f"{ending}{PART}" for ending in (TRACE, *RAW_ENDINGS, META)), PART]
    return sorted({path.removesuffix(next(filter(path.endswith, endings), "")) for path in unfinished})


def collect(
    ray: Any,
    run: Path,
    *,
    deadline: float = NEVER,
    wait: bool = False,
    progress: Callable[[int], contextlib.AbstractContextManager[Progress]],
) -> CollectedFile:
    """Collect the files of a run from all nodes of the cluster, write `collected.json`, and return its content.

    Args:
        ray: The module `ray`, connected to the cluster.
        run: The run directory here. Its name is the id of the run. The directory is made if it does not exist.
        deadline: The time at which all calls end, by `time.monotonic`.
        wait: True to wait until no process of the run is writing files.
        progress: Function that makes a progress bar for a total number of bytes.

    Raises:
        Busy: Another process is collecting this run.
        OSError: A file can't be written here.
    """
    alive = {node["NodeID"]: str(node["NodeManagerHostname"]) for node in ray.nodes() if node["Alive"]}
    registered = cluster.nodes_of_run(run.name)
    if run.is_dir():
        files.open_as(run)
    task = cluster.shipped(ray, cluster.NODE_FUNCTIONS)
    gathering = Gathering(run, registered, alive, lambda node: RayNode(ray, task, node, deadline), deadline)
    result = gathering.gather(wait, progress)
    note(result)
    return result


def note(result: CollectedFile) -> None:
    """Write `collected.json`, and add the hosts, versions and recipes of all collected processes to `run.json`.

    Raises:
        OSError: A file can't be written.
    """
    directory = RunDir(Path(result.directory))
    content = hidden_in(msgspec.to_builtins(msgspec.structs.replace(result, when=time.time())))
    layout.write_json(directory.path / COLLECTED, content)
    fields = layout.fields(directory.run_json, RunFile)
    info = layout.record(fields, RunFile)
    # Do not change `run.json` while the run is running here. The process that started the run writes it at the end.
    if fields and not (info.host == identity.HOST and runs.state(info, directory.path) == "running"):
        summary = processes.summary(processes.read(directory.path), info.versions)
        hosts = sorted({*summary["hosts"], *info.hosts})
        recipes = sorted({*summary["recipes"], *info.recipes})
        layout.write_json(directory.run_json, fields | summary | {"hosts": hosts, "recipes": recipes})
        if not directory.path.with_name("latest").exists():
            directory.point_latest()
