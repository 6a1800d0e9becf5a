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
from autoprof.run import cluster
from autoprof.run.cluster import Node
from autoprof.run.collect import plan as planning
from autoprof.run.collect.fetch import CHANGED, DIED, Fetcher, File, Got, Lost, OnRay, Patience, Source
from autoprof.run.collect.plan import Entry, Index
from autoprof.rundir import decoder, layout, processes, runs
from autoprof.rundir.file_names import COLLECTED, COLLECTING
from autoprof.rundir.layout import RunDir
from autoprof.rundir.records import CollectedFile, Missing, NodeState, RunFile, Size


class Answer(msgspec.Struct, kw_only=True):
    """The answer of a node about its part of a run (`remote.look`).

    It has paths with bytes and times, and of what is not complete the seconds since it was written to.
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


class Part(Answer, kw_only=True):
    """A node's part of a run."""

    node: str
    directory: str

    def state_of(self, state: str, fetched: int = 0) -> NodeState:
        """Return the node as it is told of."""
        size = sum(each[1] for each in self.files)
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
        """Return something of this part that is not here."""
        return Missing(self.node, self.host, path, reason)

    @property
    def standing(self) -> str:
        """Return how the node stands, in the words of `NodeState`, if nothing is to be fetched from it; else empty."""
        if self.state == "absent":
            return "nothing" if self.autoprof else "no autoprof"
        return self.state if self.state != "there" else "here" if self.same else ""


_NAMED = 3


def warn_missing(missing: list[Missing], then: str) -> None:
    if missing:
        named = "; ".join(each.line for each in missing[:_NAMED])
        more = f"; and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        log.warning(f"collecting is not complete: {named}{more}; {then}")


# A list of files that a node gives at a time.
_FILES = 20_000
# So many files are noted at a time: those that are not, when collecting is killed, are compared the next time.
_NOTED = 256
# What is written to is waited for, where that was asked for; what was not for so long is not written any more.
_FRESH_S = 10.0
_PAUSE_S = 0.5
_BESIDE = "somebody else collects this run just now; try again when that is through"

Progress = Callable[[int], object]


class Busy(Exception):
    """Another process collects this run."""


class Gathering:
    """One collection of one run.

    Attributes:
        run: The run directory here.
        registered: The nodes that said that they work on the run.
        alive: The nodes of the cluster that live, by their ids, and their host names.
        source: Makes of a node's id what is asked.
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
        """Bring all parts here.

        Args:
            wait: Whether to wait for what processes of the run are writing, on all nodes.
            progress: Makes a bar for so many bytes.

        Raises:
            Busy: Another process does it.
            OSError: It can't be written here.
        """
        files.folder(self.run, own=2)
        files.folder(self.run / COLLECTING)
        with self._alone(), self._marked() as mark:
            parts = self._look(mark, wait)
            index = Index(self.run)
            found = [part.state_of(part.standing) for part in parts if part.standing]
            theirs = self._distinct(parts)
            with progress(sum(size for part in theirs for path, size, at in part.files)) as done:
                found += [self._take(part, index, done) for part in theirs]
            found += self._dead(parts, index)
        return CollectedFile(
            run=self.run.name,
            directory=str(self.run),
            nodes=sorted(found, key=lambda node: (node.host, node.id)),
            missing=self._missing,
            left_out=self._left_out,
        )

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        lock = files.descriptor(self.run / COLLECTING / "lock", flags, held=True)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Busy(_BESIDE) from None
        except OSError:  # a file system without locks
            pass
        try:
            yield
        finally:
            os.close(lock)

    @contextlib.contextmanager
    def _marked(self) -> Iterator[str]:
        """Yield a file by which nodes see that they have this disk."""
        name = f"here-{os.urandom(8).hex()}"
        files.write(self.run / COLLECTING / name, b"")
        try:
            yield f"{COLLECTING}/{name}"
        finally:
            files.remove(str(self.run / COLLECTING / name))

    def _look(self, mark: str, wait: bool) -> list[Part]:
        """Return what all nodes say. All are asked at a time: Ray may have to start a worker on each."""
        while True:
            asked = {node: self._ask(node, mark, "") for node in self.alive}
            parts = [self._said(node, mark, question) for node, question in asked.items()]
            writing = any(abs(age) < _FRESH_S for part in parts for _, age in part.unfinished)
            if not wait or not writing or self.patience.out:
                return parts
            time.sleep(_PAUSE_S)

    def _ask(self, node: str, mark: str, after: str) -> Any:
        return self.sources[node].ask("look", self._directory(node), mark, after, _FILES)

    def _directory(self, node: str) -> str:
        known = self.registered.get(node) or self._driver
        return known.directory if known else str(self.run)

    def _said(self, node: str, mark: str, asked: Any) -> Part:
        part = Part(node=node, host=host_name(self.alive[node]), directory=self._directory(node))
        try:
            while True:
                said = msgspec.convert(self.sources[node].answer(asked), Answer)
                files = [*part.files, *said.files]
                for field in ("autoprof", "state", "reason", "same", "disk", "unfinished", "left_out"):
                    setattr(part, field, getattr(said, field))
                part.host, part.files = host_name(said.host), files
                if not said.more or not said.files:
                    return part
                asked = self._ask(node, mark, said.files[-1][0])
        except Lost as error:
            part.state, part.reason = "no answer", str(error)
        except msgspec.ValidationError as error:
            part.state, part.reason = "no answer", f"its answer can't be understood: {error}"
        self._missing.append(part.missing("", part.reason))
        return part

    def _distinct(self, parts: Sequence[Part]) -> list[Part]:
        """Return the parts that lie elsewhere, each once: several nodes may be on one machine."""
        seen = {cluster.disk_of(str(self.run))}
        found = []
        for part in sorted(parts, key=lambda part: part.node not in self.registered):
            if part.state == "unreadable":
                self._missing.append(part.missing("", f"{part.directory} can't be read there: {part.reason}"))
            if not part.standing and part.disk not in seen:
                seen.add(part.disk)
                found.append(part)
        return found

    def _take(self, part: Part, index: Index, progress: Progress) -> NodeState:
        """Fetch what a node has and this directory has not."""
        fetcher = Fetcher(self.run, part.node, part.directory, self.sources[part.node], progress)
        before, fetched = len(self._missing), 0
        self._left_out += [part.missing(path, why) for path, why in part.left_out]
        for path in planning.captures(path for path, _ in part.unfinished):
            self._missing.append(part.missing(path, "it is being written, or was when its process died (.part)"))
        plan = planning.Plan(self.run, part.node, index, self._its_driver(part))
        try:
            for wanted in (plan.made(part.files, fetcher), self._changed(part, plan, fetcher)):
                for got in self._fetched(wanted, fetcher, index):
                    fetched += got.file.size if not got.problem else 0
                    if got.problem == CHANGED and not plan.again:
                        plan.changed.append(got.file)
                    elif got.problem:
                        self._missing.append(part.missing(got.file.path, got.problem))
        except Lost as error:
            lacking = len(part.files) - sum(index.same(part.node, *each) for each in part.files)
            what = f"{error}; {lacking} of its {len(part.files)} files are not here, or not as they were last"
            self._missing.append(part.missing("", what))
        except (TypeError, ValueError) as error:
            self._missing.append(part.missing("", f"its answer can't be understood: {error}"))
        self._left_out += [part.missing(path, "its name leads elsewhere") for path in plan.unsafe]
        return part.state_of("collected" if len(self._missing) == before else "incomplete", fetched)

    def _its_driver(self, part: Part) -> bool:
        return self._driver is not None and self._driver.id == part.node

    def _changed(self, part: Part, plan: planning.Plan, fetcher: Fetcher) -> Iterator[File]:
        """Return files that changed while they were read, as they are now; made when the others are through."""
        plan.again = True
        if not plan.changed:
            return
        paths = {file.path for file in plan.changed}
        fresh = self._said(part.node, "", self._ask(part.node, "", ""))
        yield from plan.made([each for each in fresh.files if each[0] in paths], fetcher)

    def _fetched(self, wanted: Iterator[File], fetcher: Fetcher, index: Index) -> Iterator[Got]:
        files = list(wanted)
        entries: list[Entry] = []
        try:
            for got in fetcher.fetch(files):
                if not got.problem:
                    file = got.file
                    entry = Entry(file.target, fetcher.node, file.path, file.size, file.mtime_ns, got.sha256)
                    entries.append(entry)
                yield got
                if len(entries) == _NOTED:
                    index.add(entries)
                    entries.clear()
        finally:
            index.add(entries)

    def _dead(self, parts: Sequence[Part], index: Index) -> list[NodeState]:
        """Return the nodes that worked on the run and are gone, but for those whose disk somebody else has, too."""
        disks = {cluster.disk_of(str(self.run)), *(part.disk for part in parts)} - {""}
        gone = [node for node in self.registered.values() if node.id not in self.alive and node.disk not in disks]
        writers = planning.writers(self.run, index) if gone else set()
        found = []
        for node in gone:
            if node.id in writers:
                continue
            before = index.files_of(node.id)
            said = f"; {before} files of it were collected before" if before else ""
            lost = f"{DIED}, and with it what it had in {node.directory}{said}"
            self._missing.append(Missing(node.id, node.host, "", lost))
            found.append(NodeState(id=node.id, host=node.host, state="dead", directory=node.directory))
        return found


def collect(
    ray: Any,
    run: Path,
    patience: Patience,
    *,
    wait: bool = False,
    progress: Callable[[int], contextlib.AbstractContextManager[Progress]],
) -> CollectedFile:
    """Bring the parts of a run together in its directory here, whose name is its id.

    Args:
        ray: The module, connected to the cluster.
        run: The directory; it is made.
        patience: How long it may take.
        wait: Whether to wait for what processes of the run are still writing.
        progress: Makes a bar for so many bytes.

    Raises:
        Busy: Another process collects it.
        OSError: It can't be written here.
    """
    alive = {node["NodeID"]: str(node["NodeManagerHostname"]) for node in ray.nodes() if node["Alive"]}
    known = cluster.nodes_of_run(run.name)
    if run.is_dir():
        files.open_as(run)
    gathering = Gathering(run, known, alive, lambda node: OnRay(ray, node, patience), patience)
    result = gathering.gather(wait, progress)
    note(result)
    return result


def note(result: CollectedFile) -> None:
    """Write down what collecting came to, and have `run.json` tell of all hosts.

    Raises:
        OSError: It can't be written.
    """
    directory = RunDir(Path(result.directory))
    told = hidden_in(msgspec.to_builtins(msgspec.structs.replace(result, when=time.time())))
    layout.write_json(directory.path / COLLECTED, told)
    fields = decoder.fields(directory.run_json, RunFile)
    info = decoder.record(fields, RunFile)
    # The process that started the run brings it up to date when it ends.
    if fields and not (info.host == identity.HOST and runs.state(info, directory.path) == "running"):
        found = processes.summary(directory, info.versions)
        hosts = sorted({*found["hosts"], *info.hosts})
        recipes = sorted({*found["recipes"], *info.recipes})
        layout.write_json(directory.run_json, fields | found | {"hosts": hosts, "recipes": recipes})
        if not directory.path.with_name("latest").exists():
            directory.point_latest()
