"""Collecting a run: the collected files, their names, and the missing ones. Nodes are folders here; real ones are in
real/test_cluster.py."""

from __future__ import annotations

import os
from typing import Any

import pytest

from autoprof.run import cluster as ray_cluster
from autoprof.run import fetch
from autoprof.run.cluster import Node
from autoprof.run.fetch import DIED, NodeLost
from tests.support.collected_nodes import CAPTURE, META, TRACE, Cluster, Question
from tests.support.helpers import process_lines


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of ten bytes."""
    monkeypatch.setattr(fetch, "PIECE", 10)


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
        "clocks/n2-7.jsonl": b"{}",
        "journal/n2-7.jsonl": b'{"kind": "process"}\n',
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
    cluster.put("n2", "oom/equal.pickle", "old")
    cluster.collect()
    cluster.put("n2", "clocks/n2-7.jsonl", '{"more": 1}')
    cluster.put("n2", "journal/n2-7.jsonl", '{"kind": "process"}\n{"kind": "step"}\n')
    os.utime(cluster.put("n2", "oom/equal.pickle", "new"), (7, 7))
    assert cluster.collect().missing == []
    content = cluster.content()
    assert content["clocks/n2-7.jsonl"] == b'{"more": 1}'
    assert content["oom/equal.pickle"] == b"new"
    assert content["journal/n2-7.jsonl"].count(b"\n") == 2
    assert not any(".node-" in path for path in content)


def test_a_file_with_another_time_and_equal_content_does_not_come_again(cluster: Cluster) -> None:
    cluster.collect()
    os.utime(cluster.nodes["n1"].folder / TRACE, (7, 7))
    result = cluster.collect()
    assert (result.fetched, result.missing, cluster.nodes["n1"].count("digest")) == (0, [], 1)


def test_a_restarted_node_with_another_id_keeps_the_names_of_its_files(cluster: Cluster) -> None:
    cluster.collect()
    cluster.nodes = {"n1": cluster.nodes["n1"], "n3": cluster.nodes["n2"]}
    before = sorted(cluster.content())
    assert (cluster.collect().fetched, sorted(cluster.content())) == (0, before)
    grown = b'{"kind": "process"}\n{"kind": "step"}\n'
    cluster.put("n3", "journal/n2-7.jsonl", grown)
    assert cluster.collect().missing == []
    assert (sorted(cluster.content()), cluster.content()["journal/n2-7.jsonl"]) == (before, grown)
    # A file here that has more than the node's is kept.
    cluster.nodes["n4"] = cluster.nodes.pop("n3")
    cluster.put("n4", "journal/n2-7.jsonl", grown[:9])
    assert cluster.collect().missing == []
    assert (sorted(cluster.content()), cluster.content()["journal/n2-7.jsonl"]) == (before, grown)


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


def kill_collect(cluster: Cluster) -> None:
    """Collect until a node has read more than 50 pieces."""
    node = cluster.nodes["n1"]

    def killed(asked: Question) -> None:
        if node.count("read") > 50:
            raise Killed

    node.before = killed
    with pytest.raises(Killed):
        cluster.collect()
    node.before = lambda asked: None


@pytest.mark.usefixtures("pieces")
def test_a_killed_collect_leaves_no_incomplete_file_and_can_be_repeated(cluster: Cluster) -> None:
    kill_collect(cluster)
    assert TRACE not in cluster.content()
    (cluster.here / ".collect" / "of-a-killed-process.part").write_bytes(b"cut")
    assert cluster.collect().missing == []
    assert cluster.content()[TRACE] == (cluster.nodes["n1"].folder / TRACE).read_bytes()
    assert list((cluster.here / ".collect").glob("*.part")) == []


@pytest.mark.parametrize("size", [5, 100])
@pytest.mark.usefixtures("pieces")
def test_a_file_that_changes_while_it_is_read_is_tried_once_more(cluster: Cluster, size: int) -> None:
    place = cluster.put("n1", "oom/x.pickle", b"a" * size)
    node, times = cluster.nodes["n1"], 0

    def written(asked: Question) -> None:
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

    def other(asked: Question) -> Any:
        said = answer(asked)
        return [(data[::-1], "0" * 64, problem) for data, _, problem in said] if asked.name == "read" else said

    node.answer = other  # type: ignore[method-assign]
    result = cluster.collect()
    assert "oom/x.pickle" in {missing.path for missing in result.missing}
    assert {missing.reason for missing in result.missing} == {"the received bytes differ from the node's file (sha256)"}
    assert "oom/x.pickle" not in cluster.content()
    assert "clocks/n2-7.jsonl" in cluster.content()


@pytest.mark.fault("a node dies while its files are fetched", "collect goes on", "its further files, which are named")
def test_a_node_that_dies_meanwhile_costs_its_own_files_only(cluster: Cluster) -> None:
    node = cluster.nodes["n1"]

    def gone(asked: Question) -> None:
        if asked.name == "read":
            raise NodeLost(DIED)

    node.before = gone
    result = cluster.collect()
    (missing,) = result.missing
    assert missing.line == "n1 (n1): the node has died; 3 of its 3 files are missing or outdated here"
    assert {node.host: node.state for node in result.nodes} == {"n1": "incomplete", "n2": "collected"}
    assert "clocks/n2-7.jsonl" in cluster.content()


@pytest.mark.fault("a node has died before", "collect goes on", "what it had, which is named with its folder")
def test_a_node_that_is_dead_is_named_with_what_is_lost(cluster: Cluster) -> None:
    cluster.registered = [Node(id="dead9", host="n9", directory="/runs/x", disk="boot:1:2")]
    result = cluster.collect()
    assert [missing.line for missing in result.missing] == [
        "n9 (dead9): the node has died, and its files in /runs/x are lost"
    ]
    assert [node.state for node in result.nodes if node.host == "n9"] == ["dead"]


def test_a_dead_node_whose_disk_is_still_there_has_lost_nothing(cluster: Cluster) -> None:
    disk = ray_cluster.disk_of(str(cluster.nodes["n1"].folder))
    cluster.registered = [Node(id="before", host="n1", directory="/runs/x", disk=disk)]
    assert cluster.collect().missing == []
    # The node wrote here directly: all nodes share the disk.
    cluster.put("", "journal/n9-1.jsonl", process_lines("n9", node="other"))
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

    def completed(asked: Question) -> None:
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
    """Containers may have the same host name, and their processes the same pids."""
    cluster.put("n2", TRACE, "theirs")
    cluster.put("n2", META, '{"state": "truncated"}')
    cluster.put("", TRACE, "mine")
    cluster.put("", META, "{}")
    expected = {
        TRACE: b"mine",
        META: b"{}",
        f"{CAPTURE}.node-n1.pt.trace.json.gz": (cluster.nodes["n1"].folder / TRACE).read_bytes(),
        f"{CAPTURE}.node-n1.meta.json": b'{"state": "complete"}',
        f"{CAPTURE}.node-n2.pt.trace.json.gz": b"theirs",
        f"{CAPTURE}.node-n2.meta.json": b'{"state": "truncated"}',
    }
    for _ in range(2):
        assert cluster.collect().missing == []
        content = cluster.content()
        assert {path: content[path] for path in content if path.startswith(CAPTURE)} == expected


def test_a_timeline_that_grew_after_a_killed_collect_is_one(cluster: Cluster) -> None:
    """Collecting was killed before it wrote the origin of the file to the index."""
    cluster.put("", "journal/n2-7.jsonl", '{"kind"')
    assert cluster.collect().missing == []
    content = cluster.content()
    assert content["journal/n2-7.jsonl"] == b'{"kind": "process"}\n'
    assert not any(".node-" in path for path in content)
    cluster.put("n1", "journal/n2-7.jsonl", '{"kind": "other"}\n')
    assert cluster.collect().missing == []
    assert cluster.content()["journal/n2-7.node-n1.jsonl"] == b'{"kind": "other"}\n'


def test_pieces_that_make_no_sense_are_named(cluster: Cluster) -> None:
    node = cluster.nodes["n1"]
    answer = node.answer
    node.answer = lambda asked: answer(asked) if asked.name == "look" else None  # type: ignore[method-assign]
    (missing,) = cluster.collect().missing
    assert missing.reason.startswith("its answer can't be understood")
    assert "clocks/n2-7.jsonl" in cluster.content()
