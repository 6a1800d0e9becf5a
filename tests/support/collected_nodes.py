"""Fake nodes of a cluster, each with a part of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from autoprof.run import node_functions
from autoprof.run.cluster import Node
from autoprof.run.gather import NEVER, Gathering
from autoprof.rundir.records import CollectedFile

CAPTURE = "global_step_000002/actor.update_actor.rank0.n1.pid7"
TRACE, META = f"{CAPTURE}.pt.trace.json.gz", f"{CAPTURE}.meta.json"


class Question(NamedTuple):
    """A call of a function of a node."""

    name: str
    arguments: tuple[Any, ...]


class Folder:
    """Fake node whose part of the run is a folder of this machine.

    Attributes:
        before: Callback before each answer, with the question.
        asked: Questions so far, with their arguments.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.before: Callable[[Question], object] = lambda asked: None
        self.asked: list[Question] = []

    def ask(self, name: str, *arguments: Any) -> Question:
        return Question(name, arguments)

    def answer(self, asked: Question) -> Any:
        self.asked.append(asked)
        self.before(asked)
        _, *arguments = asked.arguments
        if asked.name == "look":
            # Each folder counts as a separate host.
            return node_functions.look(str(self.folder), *arguments) | {"host": self.folder.name}
        return getattr(node_functions, asked.name)(str(self.folder), *arguments)

    def count(self, name: str) -> int:
        return sum(asked.name == name for asked in self.asked)


class Cluster:
    """Fake nodes and the run directory into which they are collected."""

    def __init__(self, tmp_path: Path, *names: str) -> None:
        self.here = tmp_path / "here" / "20261122-000000-abcdef"
        self.nodes = {name: Folder(tmp_path / name) for name in names}
        for node in self.nodes.values():
            node.folder.mkdir()
        self.registered: list[Node] = []

    def write(self, node: str, **files: str | bytes) -> None:
        for path, content in files.items():
            self.put(node, path, content)

    def put(self, node: str, path: str, content: str | bytes = "x") -> Path:
        place = (self.nodes[node].folder if node else self.here) / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content if isinstance(content, bytes) else content.encode())
        return place

    def collect(self, *, wait: bool = False, deadline: float = NEVER) -> CollectedFile:
        alive: Mapping[str, str] = {name: name for name in self.nodes}
        made = Gathering(self.here, self.registered, alive, self.nodes.__getitem__, deadline)
        return made.gather(wait, quiet)

    def content(self) -> dict[str, bytes]:
        found = [path for path in self.here.rglob("*") if path.is_file() and ".collect" not in path.parts]
        return {path.relative_to(self.here).as_posix(): path.read_bytes() for path in found}


@contextlib.contextmanager
def quiet(total: int) -> Iterator[Callable[[int], object]]:
    yield lambda done: None
