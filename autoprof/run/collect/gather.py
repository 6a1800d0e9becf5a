"""Collection of a run's parts from the nodes of a cluster into one run directory."""

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
from autoprof.run import cluster, node_functions
from autoprof.run.cluster import Node
from autoprof.run.collect import plan as planning
from autoprof.run.collect.fetch import CHANGED, DIED, FetchedFile, Fetcher, File, NodeLost, Patience, RayNode, Source
from autoprof.run.collect.plan import Entry, Index
from autoprof.rundir import decoder, layout, processes, runs
from autoprof.rundir.file_names import COLLECTED, COLLECTING
from autoprof.rundir.layout import RunDir
from autoprof.rundir.records import CollectedFile, Missing, NodeState, RunFile, Size


class NodeAnswer(msgspec.Struct, kw_only=True):
    """The answer of a node about its part of a run (`look` in `node_functions.py`).

    Attributes:
        host: Its host name.
        autoprof: True if autoprof is installed there.
        state: `there`, `absent` or `unreadable`; here also `no answer`.
        reason: The reason, if the part is unreadable or the node does not answer.
        same: True if the node has the disk of the run directory here.
        disk: The identity of the node's folder, as in `cluster.disk_of`.
        files: The complete files: path, size in bytes, and last change in nanoseconds since the epoch.
        unfinished: The incomplete files: path, and seconds since the last change.
        left_out: The paths that are not collected, each with its reason.
        more: True if the node has more files than in this answer.
    """

    host: str = ""
    autoprof: bool = True
    state: str = "there"
    reason: str = ""
    same: bool = False
    disk: str = ""
    files: list[tuple[str, Size, int]] = []
    unfinished: list[tuple[str, float]] = []
    left_out: list[tuple[str, str]] = []
    more: bool = False


class NodePart(NodeAnswer, kw_only=True):
    """A node's part of a run."""

    node: str
    directory: str

    def state_of(self, state: str, fetched: int = 0) -> NodeState:
        """Return the node for `collected.json`."""
        size = sum(size for _, size, _ in self.files)
        return NodeState(
            id=self.node,
            host=self.host,
            state=state,
            directory=self.directory,
            files=len(self.files),
            bytes=size,
            fetched=fetched,
        )

    def missing(self, path: str, reason: str) -> Missing:
        """Return the entry for a file of this part that was not collected."""
        return Missing(self.node, self.host, path, reason)

    @property
    def final_state(self) -> str:
        """Return the state of the node, as in `NodeState`, if it has nothing to fetch; otherwise an empty text."""
        if self.state == "absent":
            return "nothing" if self.autoprof else "no autoprof"
        return self.state if self.state != "there" else "here" if self.same else ""


_MAX_NAMED = 3


def warn_missing(missing: list[Missing], then: str) -> None:
    """Warn about files that were not collected. `then` says how to continue."""
    if missing:
        named = "; ".join(entry.line for entry in missing[:_MAX_NAMED])
        more = f"; and {len(missing) - _MAX_NAMED} more" if len(missing) > _MAX_NAMED else ""
        log.warning(f"collecting is not complete: {named}{more}; {then}")


# Maximum number of files in one answer of a node.
_MAX_FILES = 20_000
# Number of files after which the index is written. If collecting is killed, it compares the others again next time.
_INDEX_AFTER_FILES = 256
# A file that has not changed for this time is no longer being written.
_FRESH_S = 10.0
_PAUSE_S = 0.5
_BUSY = "another process is collecting this run; try again when it has ended"

Progress = Callable[[int], object]


class Busy(Exception):
    """Another process is collecting this run."""


class Gathering:
    """One collection of one run.

    Attributes:
        run: The run directory here.
        registered: The nodes that have registered with the run, by id.
        alive: The host names of the live nodes of the cluster, by id.
        sources: The live nodes as sources of files, by id.
        patience: The time limit.
    """

    def __init__(
        self,
        run: Path,
        registered: Sequence[Node],
        alive: Mapping[str, str],
        source: Callable[[str], Source],
        patience: Patience,
    ) -> None:
        self.run = run
        self.registered = {node.id: node for node in registered}
        self.alive = alive
        self.sources = {node: source(node) for node in alive}
        self.patience = patience
        self._driver = next((node for node in registered if node.driver), None)
        self._missing: list[Missing] = []
        self._left_out: list[Missing] = []

    def gather(
        self, wait: bool, progress: Callable[[int], contextlib.AbstractContextManager[Progress]]
    ) -> CollectedFile:
        """Fetch all parts.

        Args:
            wait: True to wait until no process of the run is writing files, on all nodes.
            progress: Function that makes a progress bar for a number of bytes.

        Raises:
            Busy: Another process is collecting this run.
            OSError: A file can't be written here.
        """
        files.folder(self.run, own=2)
        files.folder(self.run / COLLECTING)
        with self._lock(), self._mark() as mark:
            parts = self._look(mark, wait)
            index = Index(self.run)
            states = [part.state_of(part.final_state) for part in parts if part.final_state]
            remote_parts = self._distinct(parts)
            with progress(sum(size for part in remote_parts for _, size, _ in part.files)) as done:
                states += [self._take(part, index, done) for part in remote_parts]
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
        """Make a file while the block runs, and yield its path. A node that sees the file has the same disk."""
        name = f"here-{os.urandom(8).hex()}"
        files.write(self.run / COLLECTING / name, b"")
        try:
            yield f"{COLLECTING}/{name}"
        finally:
            files.remove(str(self.run / COLLECTING / name))

    def _look(self, mark: str, wait: bool) -> list[NodePart]:
        """Return the parts of all nodes. Ask all nodes at once, because Ray may have to start a worker on each."""
        while True:
            calls = {node: self._ask(node, mark, "") for node in self.alive}
            parts = [self._part(node, mark, call) for node, call in calls.items()]
            writing = any(abs(age) < _FRESH_S for part in parts for _, age in part.unfinished)
            if not wait or not writing or self.patience.out:
                return parts
            time.sleep(_PAUSE_S)

    def _ask(self, node: str, mark: str, after: str) -> Any:
        return self.sources[node].ask("look", self._directory(node), mark, after, _MAX_FILES)

    def _directory(self, node: str) -> str:
        registered = self.registered.get(node) or self._driver
        return registered.directory if registered else str(self.run)

    def _part(self, node: str, mark: str, call: Any) -> NodePart:
        part = NodePart(node=node, host=host_name(self.alive[node]), directory=self._directory(node))
        try:
            while True:
                answer = msgspec.convert(self.sources[node].answer(call), NodeAnswer)
                files = [*part.files, *answer.files]
                for field in ("autoprof", "state", "reason", "same", "disk", "unfinished", "left_out"):
                    setattr(part, field, getattr(answer, field))
                part.host, part.files = host_name(answer.host), files
                if not answer.more or not answer.files:
                    return part
                call = self._ask(node, mark, answer.files[-1][0])
        except NodeLost as error:
            part.state, part.reason = "no answer", str(error)
        except msgspec.ValidationError as error:
            part.state, part.reason = "no answer", f"its answer can't be understood: {error}"
        self._missing.append(part.missing("", part.reason))
        return part

    def _distinct(self, parts: Sequence[NodePart]) -> list[NodePart]:
        """Return the parts on other disks, each disk once: several nodes may be on one machine."""
        seen = {cluster.disk_of(str(self.run))}
        distinct = []
        for part in sorted(parts, key=lambda part: part.node not in self.registered):
            if part.state == "unreadable":
                self._missing.append(part.missing("", f"{part.directory} can't be read there: {part.reason}"))
            if not part.final_state and part.disk not in seen:
                seen.add(part.disk)
                distinct.append(part)
        return distinct

    def _take(self, part: NodePart, index: Index, progress: Progress) -> NodeState:
        """Fetch the files of a node that are missing or outdated here."""
        fetcher = Fetcher(self.run, part.node, part.directory, self.sources[part.node], progress)
        before, fetched = len(self._missing), 0
        self._left_out += [part.missing(path, reason) for path, reason in part.left_out]
        for path in planning.captures(path for path, _ in part.unfinished):
            self._missing.append(part.missing(path, "it is being written, or was when its process died (.part)"))
        plan = planning.Plan(self.run, part.node, index, self._has_driver(part))
        try:
            for wanted in (plan.made(part.files, fetcher), self._changed(part, plan, fetcher)):
                for result in self._fetched(wanted, fetcher, index):
                    fetched += result.file.size if not result.problem else 0
                    if result.problem == CHANGED and not plan.again:
                        plan.changed.append(result.file)
                    elif result.problem:
                        self._missing.append(part.missing(result.file.path, result.problem))
        except NodeLost as error:
            lacking = len(part.files) - sum(index.same(part.node, *listed) for listed in part.files)
            problem = f"{error}; {lacking} of its {len(part.files)} files are missing or outdated here"
            self._missing.append(part.missing("", problem))
        except (TypeError, ValueError) as error:
            self._missing.append(part.missing("", f"its answer can't be understood: {error}"))
        self._left_out += [part.missing(path, "its path leads out of the run directory") for path in plan.unsafe]
        return part.state_of("collected" if len(self._missing) == before else "incomplete", fetched)

    def _has_driver(self, part: NodePart) -> bool:
        return self._driver is not None and self._driver.id == part.node

    def _changed(self, part: NodePart, plan: planning.Plan, fetcher: Fetcher) -> Iterator[File]:
        """Yield the current state of files that changed while they were read, for a second try after the others."""
        plan.again = True
        if not plan.changed:
            return
        paths = {file.path for file in plan.changed}
        fresh = self._part(part.node, "", self._ask(part.node, "", ""))
        yield from plan.made([listed for listed in fresh.files if listed[0] in paths], fetcher)

    def _fetched(self, wanted: Iterator[File], fetcher: Fetcher, index: Index) -> Iterator[FetchedFile]:
        files = list(wanted)
        entries: list[Entry] = []
        try:
            for result in fetcher.fetch(files):
                if not result.problem:
                    file = result.file
                    entry = Entry(file.target, fetcher.node, file.path, file.size, file.mtime_ns, result.sha256)
                    entries.append(entry)
                yield result
                if len(entries) == _INDEX_AFTER_FILES:
                    index.add(entries)
                    entries.clear()
        finally:
            index.add(entries)

    def _dead(self, parts: Sequence[NodePart], index: Index) -> list[NodeState]:
        """Return the dead nodes of the run, except nodes whose disk is also on a live node or here."""
        disks = {cluster.disk_of(str(self.run)), *(part.disk for part in parts)} - {""}
        gone = [node for node in self.registered.values() if node.id not in self.alive and node.disk not in disks]
        writers = planning.writers(self.run, index) if gone else set()
        states = []
        for node in gone:
            if node.id in writers:
                continue
            before = index.files_of(node.id)
            collected = f"; {before} of them were collected before" if before else ""
            problem = f"{DIED}, and its files in {node.directory} are lost{collected}"
            self._missing.append(Missing(node.id, node.host, "", problem))
            states.append(NodeState(id=node.id, host=node.host, state="dead", directory=node.directory))
        return states


def collect(
    ray: Any,
    run: Path,
    patience: Patience,
    *,
    wait: bool = False,
    progress: Callable[[int], contextlib.AbstractContextManager[Progress]],
) -> CollectedFile:
    """Collect the parts of a run in its directory here. The name of the directory is the run's id.

    Args:
        ray: The module, connected to the cluster.
        run: The directory. It is made if it does not exist.
        patience: The time limit.
        wait: True to wait until no process of the run is writing files.
        progress: Function that makes a progress bar for a number of bytes.

    Raises:
        Busy: Another process is collecting this run.
        OSError: A file can't be written here.
    """
    alive = {node["NodeID"]: str(node["NodeManagerHostname"]) for node in ray.nodes() if node["Alive"]}
    registered = cluster.nodes_of_run(run.name)
    if run.is_dir():
        files.open_as(run)
    task = cluster.shipped(ray, node_functions)
    gathering = Gathering(run, registered, alive, lambda node: RayNode(ray, task, node, patience), patience)
    result = gathering.gather(wait, progress)
    note(result)
    return result


def note(result: CollectedFile) -> None:
    """Write `collected.json`, and add all hosts to `run.json`.

    Raises:
        OSError: A file can't be written.
    """
    directory = RunDir(Path(result.directory))
    content = hidden_in(msgspec.to_builtins(msgspec.structs.replace(result, when=time.time())))
    layout.write_json(directory.path / COLLECTED, content)
    fields = decoder.fields(directory.run_json, RunFile)
    info = decoder.record(fields, RunFile)
    # While the run is running, the process that started it updates `run.json` at its end.
    if fields and not (info.host == identity.HOST and runs.state(info, directory.path) == "running"):
        summary = processes.summary(directory, info.versions)
        hosts = sorted({*summary["hosts"], *info.hosts})
        recipes = sorted({*summary["recipes"], *info.recipes})
        layout.write_json(directory.run_json, fields | summary | {"hosts": hosts, "recipes": recipes})
        if not directory.path.with_name("latest").exists():
            directory.point_latest()
