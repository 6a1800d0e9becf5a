"""The end of a run on several nodes: the process that collects, and the process that runs `AUTOPROF_ON_FINISH`."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import msgspec
import pytest

from autoprof.base import identity, log
from autoprof.behaviours import ray as ray_behaviours
from autoprof.cli import collect, trigger
from autoprof.cli.main import main
from autoprof.run import cluster as ray_cluster
from autoprof.run import end, gather
from autoprof.run.runtime import Runtime
from autoprof.rundir import processes, runs
from autoprof.rundir.layout import RunDir
from autoprof.rundir.records import CollectedFile, Missing, NodeState
from autoprof.windows.requests import Registered, registered
from tests.support import helpers
from tests.support.helpers import process_lines


class Store:
    """Ray's key-value store in one process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kept: dict[bytes, bytes] = {}
        self.up = True
        monkeypatch.setattr(ray_cluster, "is_up", lambda: self.up)
        monkeypatch.setattr(ray_cluster, "_kv", lambda: self)

    def _internal_kv_put(self, key: bytes, value: bytes, overwrite: bool, namespace: bytes) -> bool:
        there = key in self.kept
        if overwrite or not there:
            self.kept[key] = value
        return there

    def _internal_kv_get(self, key: bytes, namespace: bytes) -> bytes | None:
        return self.kept.get(key)

    def _internal_kv_list(self, prefix: bytes, namespace: bytes) -> list[bytes]:
        return [key for key in self.kept if key.startswith(prefix)]


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Store:
    return Store(monkeypatch)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A Ray cluster with the live nodes in this list. This process is on the first node."""
    alive = ["here", "there"]
    ray = SimpleNamespace(
        is_initialized=lambda: True,
        nodes=lambda: [{"NodeID": node, "Alive": True, "NodeManagerHostname": node} for node in alive],
        get_runtime_context=lambda: SimpleNamespace(get_node_id=lambda: alive[0], gcs_address="10.0.0.1:6379"),
        util=SimpleNamespace(client=SimpleNamespace(ray=SimpleNamespace(is_connected=lambda: False))),
    )
    monkeypatch.setitem(__import__("sys").modules, "ray", ray)
    return alive


@pytest.fixture
def driver(joined: Callable[..., Runtime], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Runtime]:
    """Return a function that makes this process the starter of a run with a captured step."""

    def make(**values: Any) -> Runtime:
        run = joined(**values)
        monkeypatch.setattr(type(run), "started_here", property(lambda self: True))
        run.rundir.step(2).mkdir(parents=True)
        return run

    return make


def test_the_first_process_of_a_node_registers_it_and_the_driver_always(kept: Store, cluster: list[str]) -> None:
    assert ray_cluster.register_node("run", "/a", is_driver=False)[0] == "here"
    assert ray_cluster.register_node("run", "/b", is_driver=False)[0] == "here"
    assert [(node.id, node.directory, node.driver) for node in ray_cluster.nodes_of_run("run")] == [
        ("here", "/a", False)
    ]
    ray_cluster.register_node("run", "/c", is_driver=True)
    assert [(node.directory, node.driver) for node in ray_cluster.nodes_of_run("run")] == [("/c", True)]
    kept.kept[b"node/run/bad"] = b"{"
    assert len(ray_cluster.nodes_of_run("run")) == 1
    ray_cluster.register_node("another", "/d", is_driver=False, uid=7)
    assert ray_cluster.users_of_run() == {"another": 7, "run": None}


NOBODY = 4_000_000_000


def test_without_a_name_the_last_run_of_this_user_is_collected(kept: Store, cluster: list[str], tmp_path: Path) -> None:
    ray_cluster.register_node("20260101-own", "/a", is_driver=True, uid=os.geteuid())
    ray_cluster.register_node("20260102-own", "/b", is_driver=True, uid=os.geteuid())
    ray_cluster.register_node("20260103-other", "/c", is_driver=True, uid=NOBODY)
    assert collect._directory(tmp_path, "latest") == tmp_path / "20260102-own"
    assert collect._directory(tmp_path, "20260103") == tmp_path / "20260103-other"


def test_a_run_of_another_user_is_named_and_not_collected(kept: Store, cluster: list[str], tmp_path: Path) -> None:
    ray_cluster.register_node("20260103-other", "/c", is_driver=True, uid=NOBODY)
    with pytest.raises(runs.NotFound, match=f"; the cluster knows 20260103-other of user {NOBODY}$"):
        collect._directory(tmp_path, "latest")


def test_the_running_run_of_another_user_gets_no_request_without_its_name(kept: Store) -> None:
    other = Registered(id="20260103-other", directory="/c", host="h", node="n", pid=1, ticks=1, uid=NOBODY)
    kept.kept[registered(other.id).encode()] = msgspec.json.encode(other)
    with pytest.raises(runs.NotFound, match=f"there are 20260103-other of user {NOBODY}$"):
        trigger.find_in_ray(SimpleNamespace(), "latest")


def test_an_address_of_the_loopback_names_the_cluster_of_its_own_host_only(tmp_path: Path) -> None:
    directory = RunDir(tmp_path)
    (tmp_path / "journal").mkdir()
    for age, (host, address) in enumerate(
        [("elsewhere", "127.0.0.1:6379"), (identity.HOST, "127.0.0.1:6380"), ("elsewhere", "10.0.0.1:6379"), ("h", "")]
    ):
        path = tmp_path / "journal" / f"{host}-{age}.jsonl"
        path.write_text(process_lines(host, age, ray=address))
        os.utime(path, (1000 - age, 1000 - age))
    assert processes.ray_address(directory) == "127.0.0.1:6380"
    (tmp_path / "journal" / f"{identity.HOST}-1.jsonl").unlink()
    assert processes.ray_address(directory) == "10.0.0.1:6379"


def test_a_store_that_fails_costs_nothing_but_the_entry(kept: Store, cluster: list[str], mocker: Any) -> None:
    mocker.patch.object(ray_cluster, "put", side_effect=RuntimeError("the head has gone"))
    assert ray_cluster.register_node("run", "/a", is_driver=False) == ("here", "")


def test_a_process_registers_when_ray_is_up_and_says_its_node(
    joined: Callable[..., Runtime], kept: Store, cluster: list[str]
) -> None:
    run = joined()
    run.info = msgspec.structs.replace(run.info, uid=7)
    kept.up = False
    run.register()
    assert run.hooks.node == ""
    kept.up = True
    run.register()
    assert (run.hooks.node, run.hooks.ray) == ("here", "10.0.0.1:6379")
    assert ray_cluster.users_of_run() == {run.info.id: 7}
    kept.kept.clear()
    run.register()
    assert kept.kept == {}


def test_only_the_process_that_started_the_run_collects_and_only_from_several_nodes(
    driver: Callable[..., Runtime], joined: Callable[..., Runtime], kept: Store, cluster: list[str], mocker: Any
) -> None:
    collect = mocker.patch.object(gather, "collect")
    ray_behaviours.store_nodes_and_collect(joined(collect="1"))
    del cluster[1]
    ray_behaviours.store_nodes_and_collect(driver(collect="1"))
    assert not collect.called


def test_without_the_setting_the_nodes_are_noted_only(
    driver: Callable[..., Runtime], kept: Store, cluster: list[str], mocker: Any
) -> None:
    collect = mocker.patch.object(gather, "collect")
    run = driver()
    ray_cluster.register_node(run.info.id, "/a", is_driver=True)
    ray_behaviours.store_nodes_and_collect(run)
    assert not collect.called
    assert [node["id"] for node in run.describe()["nodes"]] == ["here"]


def test_what_is_missing_is_said_with_the_command_that_goes_on(
    driver: Callable[..., Runtime], kept: Store, cluster: list[str], mocker: Any, caplog: Any
) -> None:
    state = NodeState(id="there", host="n2", state="dead", directory="/x")
    lost = [Missing("there", "n2", f"f{number}", "gone") for number in range(5)]
    found = CollectedFile(run="r", directory="/x", nodes=[state], missing=lost, left_out=[])
    made = mocker.patch.object(gather, "collect", return_value=found)
    warned = mocker.patch.object(log, "warning")
    run = driver(collect="1", stop_timeout_s=7)
    ray_behaviours.store_nodes_and_collect(run)
    assert made.call_args.kwargs["wait"] is True
    (said,) = warned.call_args.args
    assert said.startswith("collecting is not complete: n2 (there): f0: gone; n2 (there): f1: gone")
    assert f"and 2 more; autoprof collect {run.info.id} fetches" in said
    mocker.patch.object(gather, "collect", side_effect=gather.Busy("somebody else"))
    ray_behaviours.store_nodes_and_collect(run)
    assert "somebody else" in warned.call_args.args[0]


def test_of_all_nodes_one_runs_the_command(
    driver: Callable[..., Runtime], kept: Store, cluster: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = driver(on_finish="true")
    # The trainer on another node was first.
    kept.kept[f"finish/{run.info.id}".encode()] = b""
    ray_behaviours.store_nodes_and_collect(run)
    kept.up = False
    assert end._command(run) == ""
    kept.up = True
    kept.kept.clear()
    run.first_to_finish = None
    # The driver is first, and runs the command when Ray is down.
    ray_behaviours.store_nodes_and_collect(run)
    ray_behaviours.store_nodes_and_collect(run)
    kept.up = False
    assert end._command(run) == "true"
    assert end._command(run) == ""


def test_without_ray_the_first_on_the_disk_does(driver: Callable[..., Runtime], kept: Store) -> None:
    kept.up = False
    run = driver(on_finish="true")
    assert [end._command(run), end._command(run)] == ["true", ""]


def test_after_the_last_window_the_command_waits_for_what_is_collected(
    driver: Callable[..., Runtime], mocker: Any
) -> None:
    after = mocker.patch.object(end, "_work_after_run")
    end.window_passed(driver(on_finish="true", collect="1"))
    assert not any(thread.name == "autoprof-after" for thread in threading.enumerate())
    assert not after.called


def test_what_stands_in_the_way_of_a_copy_is_said_at_the_begin(driver: Callable[..., Runtime]) -> None:
    assert ray_behaviours.collect_problem(driver(collect="1")) == ""
    said = ray_behaviours.collect_problem(SimpleNamespace(settings=SimpleNamespace(collect="gs://me:pw@bucket/x")))  # type: ignore[arg-type]
    assert said == (
        "AUTOPROF_COLLECT: the run can't be copied to gs://bucket/x: "
        "gs:// needs the package gcsfs, which is not installed"
    )


def test_a_disk_is_known_by_machine_and_folder(tmp_path: Path) -> None:
    os.mkdir(tmp_path / "a")
    assert ray_cluster.disk_of(str(tmp_path / "a")) == ray_cluster.disk_of(f"{tmp_path}/../{tmp_path.name}/a") != ""
    assert ray_cluster.disk_of(str(tmp_path / "a")) != ray_cluster.disk_of(str(tmp_path))
    assert ray_cluster.disk_of(str(tmp_path / "b")) == ""


@pytest.fixture
def addresses(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the addresses that a command connects to. No cluster answers at any of them."""
    found: list[str] = []

    def unreachable(address: str) -> None:
        found.append(address)
        raise ray_cluster.Unreachable("nothing answers")

    monkeypatch.setattr(ray_cluster, "connected", unreachable)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return found


@pytest.mark.parametrize("variable", ["", "local"])
def test_an_empty_folder_names_no_cluster(
    addresses: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, variable: str
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", variable)
    assert main(["collect", "--dir", str(tmp_path)]) == 1
    assert "no Ray cluster is known: give --ray HOST:PORT, set RAY_ADDRESS" in capsys.readouterr().err
    assert addresses == []


@pytest.mark.parametrize(
    ("options", "variable", "names"),
    [
        (["--ray", "a:1"], "b:2", "a:1"),
        ([], "b:2", "b:2"),
        ([], "", "c:3"),
        ([], "local", "c:3"),
        (["--ray", "auto"], "", "auto"),
    ],
)
def test_the_option_goes_before_the_variable_and_the_variable_before_the_run(
    addresses: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], variable: str, names: str
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", variable)
    (tmp_path / "run" / "journal").mkdir(parents=True)
    (tmp_path / "run" / "run.json").write_text('{"state": "ended"}')
    (tmp_path / "run" / "journal" / "h-1.jsonl").write_text(process_lines(ray="c:3"))
    assert main(["collect", "run", "--dir", str(tmp_path), *options]) == 0
    assert addresses == [names]


def test_a_run_without_ray_is_asked_nowhere(addresses: list[str], tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text('{"state": "ended"}')
    assert main(["collect", "run", "--dir", str(tmp_path)]) == 0
    said = "the run names no Ray cluster; name one with --ray HOST:PORT; run run is complete here\n"
    assert capsys.readouterr().out == said
    assert addresses == []


def test_without_a_cluster_and_without_a_run_here_both_are_said(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "autoprof", "collect", "--ray", "127.0.0.1:1"]
    done = helpers.run(command, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("autoprof: no Ray cluster at '127.0.0.1:1': nothing answers there (")
    assert f"); there is no folder '{tmp_path}/autoprof_runs'" in done.stderr


@pytest.mark.needs("ray")
@pytest.mark.parametrize("kind", ["authentication", "connection", "version"])
def test_what_keeps_ray_from_a_cluster_that_answers_is_said(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.exceptions import AuthenticationError

    error, said = {
        "authentication": (
            AuthenticationError("Token authentication is enabled but no token was found"),
            "Token authe",
        ),
        "connection": (ConnectionError("Failed to connect to Ray cluster at 192.0.2.2:6391"), "Failed to connect to "),
        "version": (RuntimeError("Version mismatch"), "Version mismatch"),
    }[kind]

    def init(**_: Any) -> NoReturn:
        raise error

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=init))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(ray_cluster.Unreachable) as caught, ray_cluster.connected(address):
            pass
    text = str(caught.value)
    assert text.startswith(f"can't connect to the Ray cluster at {address!r}: {type(error).__name__}: {said}")
    assert ("RAY_AUTH_TOKEN here" in text) == (kind == "connection")
