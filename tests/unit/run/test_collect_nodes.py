"""Collecting from nodes: their names, links, disks and answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autoprof.cli import nodes as stacks_node
from autoprof.run import cluster, gather, node_functions
from autoprof.run.cluster import Node
from autoprof.run.fetch import NodeLost, is_safe, path_for_node
from autoprof.run.gather import Busy
from autoprof.rundir import file_names, records
from autoprof.rundir.layout import RunDir
from tests.support.collected_nodes import Cluster, Folder, Question
from tests.support.helpers import process_lines


@pytest.mark.parametrize(
    ("module", "call"),
    [(cluster.NODE_FUNCTIONS, "clock()"), (stacks_node.__name__, "ask('/dev/null/run', 'now', b'', 0, False, False)")],
)
def test_modules_for_other_nodes_run_without_any_package(module: str, call: str) -> None:
    tasks: list[Any] = []
    cluster.shipped(SimpleNamespace(remote=tasks.append), module)
    (source,) = [cell.cell_contents for cell in tasks[0].__closure__ if isinstance(cell.cell_contents, str)]
    code = f"import sys; exec(sys.stdin.read()); print({call})"
    command = [sys.executable, "-I", "-S", "-c", code]
    done = subprocess.run(command, input=source, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_modules_for_other_nodes_have_the_names_of_the_run_directory(tmp_path: Path) -> None:
    names = (RunDir(tmp_path).control.name, file_names.COLLECTED, file_names.PART)
    assert names == (node_functions.CONTROL, node_functions.COLLECTED, node_functions.PART)
    own_names = (file_names.RUN, file_names.STEP, file_names.META, file_names.PART, file_names.MERGING)
    assert own_names == (
        stacks_node.RUN,
        stacks_node.STEP,
        stacks_node.META,
        stacks_node.PART,
        stacks_node.MERGING,
    )
    assert file_names.LOOP == stacks_node.LOOP
    limits = (records.STACKS, records.WHY, records.MAX_STACKS_BYTES)
    assert limits == (stacks_node.STACKS, stacks_node.WHY, stacks_node.MAX_STACKS_BYTES)


def test_names_of_other_nodes() -> None:
    assert path_for_node("journal/h-7.jsonl", "ab" * 20) == f"journal/h-7.node-{'ab' * 6}.jsonl"
    assert path_for_node("oom/h-7.1.pickle", "x") == "oom/h-7.1.node-x.pickle"
    assert path_for_node("s/a.rank0.meta.json", "x") == "s/a.rank0.node-x.meta.json"
    assert path_for_node("s/a.rank0.pt.trace.json.gz", "x") == "s/a.rank0.node-x.pt.trace.json.gz"
    assert path_for_node("exit_status", "x") == "exit_status.node-x"
    assert path_for_node("s/a.b_7_20_ascend_pt/PROF/x.json", "x") == "s/a.b.node-x_7_20_ascend_pt/PROF/x.json"


HOSTILE = ["../x", "/etc/x", "a/../../x", "a//x", "", ".collect/index.jsonl", ".on_finish", "a/./b", "x.part", "n\0l"]


@pytest.mark.parametrize("path", [*HOSTILE, "a/" * 40 + "b", "é" * 200])
def test_names_that_lead_elsewhere(path: str) -> None:
    assert not is_safe(path)


@pytest.mark.parametrize("path", ["journal/h-1.jsonl", "a b/\udcff", "x..", "a/..."])
def test_names_that_do_not(path: str) -> None:
    assert is_safe(path)


def test_a_hostile_list_of_files_writes_nothing_elsewhere(cluster: Cluster, tmp_path: Path) -> None:
    node = cluster.nodes["n1"]
    answer = node.answer

    def hostile(asked: Question) -> Any:
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


@pytest.mark.parametrize(
    "said", [None, {"files": [("x", -1, 0)]}, {"files": ["x"]}, {"files": [(7, 1, 1)]}, {"host": 5}, [1]]
)
def test_an_answer_that_makes_no_sense_is_named(cluster: Cluster, said: Any) -> None:
    node = cluster.nodes["n1"]
    node.answer = lambda asked: said  # type: ignore[method-assign]
    result = cluster.collect()
    (missing,) = result.missing
    assert missing.reason.startswith("its answer can't be understood")
    assert "clocks/n2-7.jsonl" in cluster.content()


def test_links_are_not_followed_on_either_side(cluster: Cluster, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key").write_text("secret")
    (cluster.nodes["n1"].folder / "linked").symlink_to(secret)
    (cluster.nodes["n1"].folder / "key.json").symlink_to(secret / "key")
    cluster.here.mkdir(parents=True)
    (cluster.here / "clocks").symlink_to(secret)
    result = cluster.collect()
    assert sorted(left.path for left in result.left_out) == ["key.json", "linked"]
    (missing,) = result.missing
    assert missing.path == "clocks/n2-7.jsonl"
    assert "exists and is not a folder" in missing.reason
    assert os.listdir(secret) == ["key"]


def test_a_link_that_comes_between_the_list_and_the_read_is_not_followed(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("{}")
    place = cluster.nodes["n2"].folder / "clocks" / "n2-7.jsonl"

    def planted(asked: Question) -> None:
        if asked.name == "read" and not place.is_symlink():
            place.unlink()
            place.symlink_to(tmp_path / "key")

    cluster.nodes["n2"].before = planted
    (missing,) = cluster.collect().missing
    assert missing.path == "clocks/n2-7.jsonl"
    assert "clocks/n2-7.jsonl" not in cluster.content()


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


def test_run_json_lists_all_hosts(cluster: Cluster) -> None:
    hooks = {"verl/step": {"state": "applied"}}
    cluster.put("n2", "journal/n2-7.jsonl", process_lines("n2", 7, hooks, versions={"verl": "0.9.1"}))
    cluster.put("n1", "run.json", '{"host": "n1", "state": "ended", "hosts": ["n1"], "versions": {"ray": "2.60.0"}}')
    gather.note(cluster.collect())
    info = json.loads(cluster.content()["run.json"])
    assert (info["hosts"], info["versions"]) == (["n1", "n2"], {"ray": "2.60.0", "verl": "0.9.1"})
    assert info["recipes"] == ["verl"]
    told = json.loads((cluster.here / file_names.COLLECTED).read_text())
    assert [node["state"] for node in told["nodes"]] == ["collected", "collected"]
    assert (cluster.here.parent / "latest").resolve() == cluster.here


def test_two_at_a_time_are_one_too_many(cluster: Cluster) -> None:
    cluster.nodes["n1"].before = lambda asked: cluster.collect()
    with pytest.raises(Busy):
        cluster.collect()


def test_without_time_what_lacks_is_named(cluster: Cluster) -> None:
    class Hasty(Folder):
        def answer(self, asked: Question) -> Any:
            if asked.name != "look":
                raise NodeLost("there was no time left")
            return super().answer(asked)

    cluster.nodes["n1"] = Hasty(cluster.nodes["n1"].folder)
    (missing,) = cluster.collect(deadline=0).missing
    assert missing.line.startswith("n1 (n1): there was no time left; 3 of its 3 files")
