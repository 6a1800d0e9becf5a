"""Collecting a run: which files come, what they are called, what is missing. Nodes are folders here; real ones are in
real/test_cluster.py."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from autoprof import nodes, rundir
from autoprof.collect import fetching, gathering, here
from autoprof.collect.asking import DIED, Asked, Lost, Patience
from autoprof.collect.gathering import Busy, Gathering
from autoprof.collect.naming import of_node, safe
from autoprof.collect.remote import functions
from autoprof.collect.result import Result
from autoprof.nodes import Node

CAPTURE = "global_step_000002/actor.update_actor.rank0.n1.pid7"
TRACE, META = f"{CAPTURE}.pt.trace.json.gz", f"{CAPTURE}.meta.json"


class Folder:
    """A node whose part of the run is a folder of this machine.

    Attributes:
        before: Is called before each answer, with the name of the question.
        asked: The questions, with their arguments.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.before: Callable[[Asked], object] = lambda asked: None
        self.asked: list[Asked] = []
        self._functions = functions()

    def ask(self, name: str, *arguments: Any) -> Asked:
        return Asked(name, arguments, None, 0.0)

    def answer(self, asked: Asked) -> Any:
        self.asked.append(asked)
        self.before(asked)
        _, *arguments = asked.arguments
        if asked.name == "look":
            # Each folder is a machine of its own.
            return self._functions["look"](str(self.folder), *arguments) | {"host": self.folder.name}
        return self._functions[asked.name](str(self.folder), *arguments)

    def count(self, name: str) -> int:
        return sum(asked.name == name for asked in self.asked)


class Cluster:
    """A few nodes, and the run directory that they are collected into."""

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

    def collect(self, *, wait: bool = False, patience: Patience | None = None) -> Result:
        alive: Mapping[str, str] = {name: name for name in self.nodes}
        made = Gathering(self.here, self.registered, alive, self.nodes.__getitem__, patience or Patience())
        return made.gather(wait, quiet)

    def content(self) -> dict[str, bytes]:
        found = [path for path in self.here.rglob("*") if path.is_file() and ".collect" not in path.parts]
        return {path.relative_to(self.here).as_posix(): path.read_bytes() for path in found}


@contextlib.contextmanager
def quiet(total: int) -> Iterator[Callable[[int], object]]:
    yield lambda done: None


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    made = Cluster(tmp_path, "n1", "n2")
    made.put("n1", TRACE, os.urandom(1000))
    made.put("n1", META, '{"state": "complete"}')
    made.put("n1", "run.json", "{}")
    made.put("n2", "run.json", "{}")
    made.put("n2", "hooks/n2-7.json", "{}")
    made.put("n2", "timeline/n2-7.jsonl", '{"kind": "process"}\n')
    return made


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of ten bytes."""
    monkeypatch.setattr(fetching, "PIECE", 10)


def test_the_parts_of_all_nodes_come(cluster: Cluster) -> None:
    result = cluster.collect()
    assert result.missing == []
    assert [(node.host, node.state, node.files) for node in result.nodes] == [
        ("n1", "collected", 3),
        ("n2", "collected", 3),
    ]
    assert cluster.content() == {
        TRACE: (cluster.nodes["n1"].folder / TRACE).read_bytes(),
        META: b'{"state": "complete"}',
        "run.json": b"{}",
        "hooks/n2-7.json": b"{}",
        "timeline/n2-7.jsonl": b'{"kind": "process"}\n',
    }
    place, theirs = cluster.here / TRACE, cluster.nodes["n1"].folder / TRACE
    assert place.stat().st_mtime_ns == theirs.stat().st_mtime_ns
    assert place.stat().st_mode & 0o777 == 0o600


def test_what_is_here_does_not_come_again(cluster: Cluster) -> None:
    first = cluster.collect()
    for node in cluster.nodes.values():
        node.asked.clear()
    second = cluster.collect()
    assert first.fetched > 0
    assert (second.fetched, second.missing) == (0, [])
    assert [node.count("read") for node in cluster.nodes.values()] == [0, 0]


def test_what_has_changed_there_since_comes_again(cluster: Cluster) -> None:
    cluster.collect()
    cluster.put("n2", "hooks/n2-7.json", '{"more": 1}')
    cluster.put("n2", "timeline/n2-7.jsonl", '{"kind": "process"}\n{"kind": "step"}\n')
    assert cluster.collect().missing == []
    content = cluster.content()
    assert content["hooks/n2-7.json"] == b'{"more": 1}'
    assert content["timeline/n2-7.jsonl"].count(b"\n") == 2
    assert not any(".node-" in path for path in content)


@pytest.mark.usefixtures("pieces")
def test_no_piece_is_larger_than_it_may_be(cluster: Cluster) -> None:
    assert cluster.collect().missing == []
    for node in cluster.nodes.values():
        for asked in node.asked:
            if asked.name == "read":
                assert sum(length for _, _, length, _, _ in asked.arguments[1]) <= 10
    assert len(cluster.content()[TRACE]) == 1000


class Killed(BaseException):
    pass


@pytest.mark.usefixtures("pieces")
def test_a_file_goes_on_where_a_killed_collect_left_it(cluster: Cluster) -> None:
    node = cluster.nodes["n1"]

    def killed(asked: Asked) -> None:
        if node.count("read") > 50:
            raise Killed

    node.before = killed
    with pytest.raises(Killed):
        cluster.collect()
    assert TRACE not in cluster.content()
    node.before, before = lambda asked: None, node.count("read")
    assert cluster.collect().missing == []
    assert cluster.content()[TRACE] == (node.folder / TRACE).read_bytes()
    assert node.count("read") - before < 70
    assert list((cluster.here / ".collect").glob("*.part")) == []


@pytest.mark.usefixtures("pieces")
def test_what_an_earlier_collect_left_is_not_trusted(cluster: Cluster) -> None:
    node = cluster.nodes["n1"]

    def killed(asked: Asked) -> None:
        if node.count("read") > 50:
            raise Killed

    node.before = killed
    with pytest.raises(Killed):
        cluster.collect()
    (part,) = (cluster.here / ".collect").glob("*.part")
    part.write_bytes(b"\0" * part.stat().st_size)
    node.before = lambda asked: None
    assert cluster.collect().missing == []
    assert cluster.content()[TRACE] == (node.folder / TRACE).read_bytes()


@pytest.mark.parametrize("size", [5, 100])
@pytest.mark.usefixtures("pieces")
def test_a_file_that_changes_while_it_is_read_is_tried_once_more(cluster: Cluster, size: int) -> None:
    place = cluster.put("n1", "oom/x.pickle", b"a" * size)
    node, times = cluster.nodes["n1"], 0

    def written(asked: Asked) -> None:
        nonlocal times
        if asked.name == "read" and any(path == "oom/x.pickle" for path, *_ in asked.arguments[1]) and times < often:
            times += 1
            place.write_bytes(b"%d" % times * (size + times))

    often = 1
    node.before = written
    assert cluster.collect().missing == []
    assert cluster.content()["oom/x.pickle"] == place.read_bytes()
    often, times = 1000, 1
    place.write_bytes(b"again" * size)
    (missing,) = cluster.collect().missing
    assert (missing.path, missing.reason, missing.node) == ("oom/x.pickle", "it changed while it was read", "n1")
    assert cluster.content()["oom/x.pickle"] == b"1" * (size + 1)


@pytest.mark.fault("a node gives other bytes than it has", "collect goes on", "that file, which is named")
@pytest.mark.parametrize("size", [5, 100])
@pytest.mark.usefixtures("pieces")
def test_what_does_not_come_as_it_is_gets_no_name(cluster: Cluster, size: int) -> None:
    cluster.put("n1", "oom/x.pickle", os.urandom(size))
    node = cluster.nodes["n1"]
    answer = node.answer

    def other(asked: Asked) -> Any:
        said = answer(asked)
        if asked.name == "digest":
            return ["0" * 64 for _ in said]
        return [(data[::-1], "0" * 64, problem) for data, _, problem in said] if asked.name == "read" else said

    node.answer = other  # type: ignore[method-assign]
    result = cluster.collect()
    assert "oom/x.pickle" in {missing.path for missing in result.missing}
    assert {missing.reason for missing in result.missing} == {"what came is not what the node has (sha256)"}
    assert "oom/x.pickle" not in cluster.content()
    assert "hooks/n2-7.json" in cluster.content()


@pytest.mark.fault("a node dies while its files are fetched", "collect goes on", "its further files, which are named")
def test_a_node_that_dies_meanwhile_costs_its_own_files_only(cluster: Cluster) -> None:
    node = cluster.nodes["n1"]

    def gone(asked: Asked) -> None:
        if asked.name == "read":
            raise Lost(DIED)

    node.before = gone
    result = cluster.collect()
    (missing,) = result.missing
    assert missing.line == "n1 (n1): the node has died; 3 of its 3 files are not here, or not as they were last"
    assert {node.host: node.state for node in result.nodes} == {"n1": "incomplete", "n2": "collected"}
    assert "hooks/n2-7.json" in cluster.content()


@pytest.mark.fault("a node has died before", "collect goes on", "what it had, which is named with its folder")
def test_a_node_that_is_dead_is_named_with_what_is_lost(cluster: Cluster) -> None:
    cluster.registered = [Node(id="dead9", host="n9", directory="/runs/x", disk="boot:1:2")]
    result = cluster.collect()
    assert [missing.line for missing in result.missing] == [
        "n9 (dead9): the node has died, and with it what it had in /runs/x"
    ]
    assert [node.state for node in result.nodes if node.host == "n9"] == ["dead"]


def test_a_dead_node_whose_disk_is_still_there_has_lost_nothing(cluster: Cluster) -> None:
    disk = nodes.identity(str(cluster.nodes["n1"].folder))
    cluster.registered = [Node(id="before", host="n1", directory="/runs/x", disk=disk)]
    assert cluster.collect().missing == []
    # It wrote here itself: the disk is that of all.
    cluster.put("", "hooks/n9-1.json", '{"node": "other"}')
    cluster.registered = [Node(id="other", host="n9", directory="/runs/x", disk="boot:1:2")]
    assert cluster.collect().missing == []


def test_what_is_being_written_is_named_once_a_capture(cluster: Cluster) -> None:
    for ending in (".meta.json.part", ".pt.trace.json.part"):
        cluster.put("n2", f"global_step_000002/critic.rank0.n2.pid7{ending}")
    cluster.put("n2", "global_step_000002/x_1_2_ascend_pt.part/raw")
    result = cluster.collect()
    assert [missing.path for missing in result.missing] == [
        "global_step_000002/critic.rank0.n2.pid7",
        "global_step_000002/x_1_2",
    ]
    assert not any("critic" in path for path in cluster.content())


def test_what_is_being_written_is_waited_for(cluster: Cluster) -> None:
    node = cluster.nodes["n2"]
    part = cluster.put("n2", "oom/x.pickle.part", "whole")

    def completed(asked: Asked) -> None:
        if node.count("look") == 3 and part.exists():
            part.rename(part.with_suffix(""))

    node.before = completed
    assert cluster.collect(wait=True).missing == []
    assert cluster.content()["oom/x.pickle"] == b"whole"


def test_equal_files_of_two_nodes_are_one(cluster: Cluster) -> None:
    cluster.put("n1", "oom/same.pickle", "same")
    cluster.put("n2", "oom/same.pickle", "same")
    assert cluster.collect().missing == []
    assert sum("same" in path for path in cluster.content()) == 1


def test_different_files_of_one_name_are_all_kept(cluster: Cluster) -> None:
    """Containers may have one host name, and their processes the same pids."""
    cluster.put("n2", TRACE, "theirs")
    cluster.put("n2", META, '{"state": "truncated"}')
    cluster.put("", TRACE, "mine")
    expected = {
        TRACE: b"mine",
        f"{CAPTURE}.node-n1.pt.trace.json.gz": (cluster.nodes["n1"].folder / TRACE).read_bytes(),
        # The files of a capture keep one name, though there was no other meta file here.
        f"{CAPTURE}.node-n1.meta.json": b'{"state": "complete"}',
        f"{CAPTURE}.node-n2.pt.trace.json.gz": b"theirs",
        f"{CAPTURE}.node-n2.meta.json": b'{"state": "truncated"}',
    }
    for _ in range(2):
        assert cluster.collect().missing == []
        content = cluster.content()
        assert {path: content[path] for path in content if path.startswith(CAPTURE)} == expected


def test_a_timeline_that_grew_after_a_killed_collect_is_one(cluster: Cluster) -> None:
    """Killed before it was noted from where the file came."""
    cluster.put("", "timeline/n2-7.jsonl", '{"kind"')
    assert cluster.collect().missing == []
    content = cluster.content()
    assert content["timeline/n2-7.jsonl"] == b'{"kind": "process"}\n'
    assert not any(".node-" in path for path in content)
    cluster.put("n1", "timeline/n2-7.jsonl", '{"kind": "other"}\n')
    assert cluster.collect().missing == []
    assert cluster.content()["timeline/n2-7.node-n1.jsonl"] == b'{"kind": "other"}\n'


def test_pieces_that_make_no_sense_are_named(cluster: Cluster) -> None:
    node = cluster.nodes["n1"]
    answer = node.answer
    node.answer = lambda asked: answer(asked) if asked.name == "look" else None  # type: ignore[method-assign]
    (missing,) = cluster.collect().missing
    assert missing.reason.startswith("its answer can't be understood")
    assert "hooks/n2-7.json" in cluster.content()


def test_names_of_other_nodes() -> None:
    assert of_node("hooks/h-7.json", "ab" * 20) == f"hooks/h-7.node-{'ab' * 6}.json"
    assert of_node("oom/h-7.1.pickle", "x") == "oom/h-7.1.node-x.pickle"
    assert of_node("s/a.b_7_20_ascend_pt/PROF/x.json", "x") == "s/a.b.node-x_7_20_ascend_pt/PROF/x.json"


HOSTILE = ["../x", "/etc/x", "a/../../x", "a//x", "", ".collect/index.jsonl", ".on_finish", "a/./b", "x.part", "n\0l"]


@pytest.mark.parametrize("path", [*HOSTILE, "a/" * 40 + "b", "é" * 200, 7, None])
def test_names_that_lead_elsewhere(path: Any) -> None:
    assert not safe(path)


@pytest.mark.parametrize("path", ["hooks/h-1.json", "a b/\udcff", "x..", "a/..."])
def test_names_that_do_not(path: str) -> None:
    assert safe(path)


def test_a_hostile_list_of_files_writes_nothing_elsewhere(cluster: Cluster, tmp_path: Path) -> None:
    node = cluster.nodes["n1"]
    answer = node.answer

    def hostile(asked: Asked) -> Any:
        said = answer(asked)
        if asked.name == "look":
            said["files"] = [(path, 1, 1) for path in HOSTILE] + said["files"]
        return said

    before = {path for path in tmp_path.rglob("*") if cluster.here not in path.parents}
    node.answer = hostile  # type: ignore[method-assign]
    result = cluster.collect()
    assert [left.path for left in result.left_out] == HOSTILE
    assert {path for path in tmp_path.rglob("*") if cluster.here not in path.parents} - before == {
        cluster.here.parent,
        cluster.here,
    }
    assert result.missing == []


@pytest.mark.parametrize("said", [None, {"files": [("x", -1, 0)]}, {"files": ["x"]}, {"host": 5}, [1]])
def test_an_answer_that_makes_no_sense_is_named(cluster: Cluster, said: Any) -> None:
    node = cluster.nodes["n1"]
    node.answer = lambda asked: said  # type: ignore[method-assign]
    result = cluster.collect()
    (missing,) = result.missing
    assert missing.reason.startswith("its answer can't be understood")
    assert "hooks/n2-7.json" in cluster.content()


def test_links_are_not_followed_on_either_side(cluster: Cluster, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key").write_text("secret")
    (cluster.nodes["n1"].folder / "linked").symlink_to(secret)
    (cluster.nodes["n1"].folder / "key.json").symlink_to(secret / "key")
    cluster.here.mkdir(parents=True)
    (cluster.here / "hooks").symlink_to(secret)
    result = cluster.collect()
    assert sorted(left.path for left in result.left_out) == ["key.json", "linked"]
    (missing,) = result.missing
    assert missing.path == "hooks/n2-7.json"
    assert "there is something else in the place" in missing.reason
    assert os.listdir(secret) == ["key"]


def test_a_link_that_comes_between_the_list_and_the_read_is_not_followed(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("{}")
    place = cluster.nodes["n2"].folder / "hooks" / "n2-7.json"

    def planted(asked: Asked) -> None:
        if asked.name == "read" and not place.is_symlink():
            place.unlink()
            place.symlink_to(tmp_path / "key")

    cluster.nodes["n2"].before = planted
    (missing,) = cluster.collect().missing
    assert missing.path == "hooks/n2-7.json"
    assert "hooks/n2-7.json" not in cluster.content()


def test_a_node_with_this_disk_is_not_read(cluster: Cluster) -> None:
    cluster.here.mkdir(parents=True)
    cluster.nodes["n1"] = Folder(cluster.here)
    result = cluster.collect()
    assert {node.state for node in result.nodes} == {"here", "collected"}
    assert cluster.nodes["n1"].count("read") == 0


def test_two_nodes_of_one_machine_are_read_once(cluster: Cluster) -> None:
    cluster.nodes["n3"] = Folder(cluster.nodes["n2"].folder)
    result = cluster.collect()
    assert result.missing == []
    assert cluster.nodes["n2"].count("read") + cluster.nodes["n3"].count("read") == 1


def test_nodes_on_which_nothing_was_left(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("n3", "n4"):
        cluster.nodes[name] = Folder(cluster.nodes["n1"].folder.with_name(name))
    answer = cluster.nodes["n4"].answer
    monkeypatch.setattr(cluster.nodes["n4"], "answer", lambda asked: answer(asked) | {"autoprof": False})
    result = cluster.collect()
    assert result.missing == []
    assert {node.host: node.state for node in result.nodes if node.host in ("n3", "n4")} == {
        "n3": "nothing",
        "n4": "no autoprof",
    }


def test_a_folder_that_can_not_be_read_is_named(cluster: Cluster) -> None:
    folder = cluster.nodes["n2"].folder
    cluster.nodes["n2"].folder = folder / "run.json"  # no folder at all
    (missing,) = cluster.collect().missing
    assert "can't be read there" in missing.reason


def test_the_drivers_run_json_is_the_one_that_counts(cluster: Cluster) -> None:
    cluster.put("n2", "run.json", '{"state": "ended", "host": "n2"}')
    cluster.put("", "run.json", "{}")
    cluster.collect()
    assert cluster.content()["run.json"] == b"{}"
    cluster.registered = [Node(id="n2", host="n2", directory=str(cluster.nodes["n2"].folder), driver=True)]
    assert cluster.collect().missing == []
    assert json.loads(cluster.content()["run.json"])["state"] == "ended"


def test_run_json_tells_of_all_hosts(cluster: Cluster) -> None:
    process = {"host": "n2", "versions": {"verl": "0.9.1"}, "hooks": {"verl/step": {"state": "applied"}}}
    cluster.put("n2", "hooks/n2-7.json", json.dumps(process))
    cluster.put("n1", "run.json", '{"host": "n1", "state": "ended", "hosts": ["n1"], "versions": {"ray": "2.60.0"}}')
    here.note(cluster.collect())
    info = json.loads(cluster.content()["run.json"])
    assert (info["hosts"], info["versions"]) == (["n1", "n2"], {"ray": "2.60.0", "verl": "0.9.1"})
    assert info["recipes"] == ["verl"]
    told = json.loads((cluster.here / rundir.COLLECTED).read_text())
    assert [node["state"] for node in told["nodes"]] == ["collected", "collected"]
    assert (cluster.here.parent / "latest").resolve() == cluster.here


def test_long_lists_of_files_come_in_parts(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "_FILES", 2)
    for number in range(7):
        cluster.put("n1", f"oom/{number}.pickle", str(number))
    assert cluster.collect().missing == []
    assert sum(path.startswith("oom/") for path in cluster.content()) == 7
    assert cluster.nodes["n1"].count("look") == 5


def test_two_at_a_time_are_one_too_many(cluster: Cluster) -> None:
    cluster.nodes["n1"].before = lambda asked: cluster.collect()
    with pytest.raises(Busy):
        cluster.collect()


def test_without_time_what_lacks_is_named(cluster: Cluster) -> None:
    class Hasty(Folder):
        def answer(self, asked: Asked) -> Any:
            if asked.name != "look":
                raise Lost("there was no time left")
            return super().answer(asked)

    cluster.nodes["n1"] = Hasty(cluster.nodes["n1"].folder)
    (missing,) = cluster.collect(patience=Patience(0)).missing
    assert missing.line.startswith("n1 (n1): there was no time left; 3 of its 3 files")
