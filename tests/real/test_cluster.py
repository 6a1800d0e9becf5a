"""Runs over several Ray nodes with their own disks and host names: settings, `collect`, a merged trace, a lost node.

The cluster is started before the runs, without autoprof's environment.
"""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autoprof.base import identity
from autoprof.rundir import file_names, layout, runs
from autoprof.rundir.layout import RunDir
from autoprof.rundir.records import RunFile
from autoprof.rundir.runs import Run
from autoprof.traces import clocks
from tests.support import processes
from tests.support.clusters import Spread, permitted
from tests.support.helpers import autoprof, clean_environment, wait_for, wait_for_line
from tests.support.ray_clusters import SCRIPTS

pytestmark = pytest.mark.skipif(not permitted(), reason="needs root, for own host names and mounts")

BARE, DRIVER, LATER = "bare", identity.HOST, "later"
TRACED = [DRIVER, "node-b", "node-c"]
ON = {
    "AUTOPROF": "1",
    "AUTOPROF_RECIPES": str(SCRIPTS / "spread_lib.toml"),
    "AUTOPROF_RANKS": "all",
    "AUTOPROF_CONTENTS": "cpu",
    "OMP_NUM_THREADS": "1",
}


class Spreading:
    """Runs on one cluster, all in the same folder of runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs = folder / "autoprof_runs"
        # Let Ray notice a dead node within two seconds instead of a minute.
        quickly = {"RAY_health_check_period_ms": "500", "RAY_health_check_failure_threshold": "4"}
        self.cluster = Spread(folder, self.runs, clean_environment(OMP_NUM_THREADS="1", **quickly))

    def drive(self, phase: str, during: Any, **variables: str) -> tuple[dict[str, Any], str]:
        beside = threading.Thread(target=during)
        beside.start()
        command = [sys.executable, str(SCRIPTS / "spread.py"), self.cluster.address, phase]
        finished = processes.run(command, cwd=self.folder, env=clean_environment(**ON, **variables), timeout_s=240)
        beside.join()
        assert finished.status == 0, finished.output[-4000:]
        return finished.result, finished.output

    def autoprof(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return autoprof(*arguments, cwd=self.folder)

    def run(self) -> Run:
        return runs.find(self.runs, "latest")


@pytest.fixture(scope="module")
def spread(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spreading]:
    made = Spreading(tmp_path_factory.mktemp("spread"))
    try:
        for name in ("node-b", "node-c", BARE):
            made.cluster.add(name, bare=name == BARE)
        yield made
    finally:
        made.cluster.end()


class Windowed:
    """Run with windows in steps 2 and 3, and the results of collecting it twice.

    Between the two steps a node is added and a worker dies.
    """

    def __init__(self, spread: Spreading) -> None:
        self.spread = spread

        def add() -> None:
            wait_for(spread.folder / "wants-later", 200)
            spread.cluster.add(LATER)

        self.result, self.output = spread.drive("window", add, AUTOPROF_STEPS="2,3")
        self.before = hosts(spread.run(), 2)
        self.path = Path(spread.run().path)
        self.before_collect = layout.read_json(self.path / "run.json", RunFile)
        self.collected = spread.autoprof("collect", "--ray", spread.cluster.address, "--json")
        self.again = spread.autoprof("collect", "--ray", spread.cluster.address, "--json")


@pytest.fixture(scope="module")
def windowed(spread: Spreading) -> Windowed:
    return Windowed(spread)


def hosts(run: Run, step: int) -> list[str]:
    return sorted(capture.meta.host for capture in runs.step(run, step).captures)


def test_settings_run_id_and_step_reach_nodes_added_later_and_restarted_workers(windowed: Windowed) -> None:
    result = windowed.result
    assert sorted(result["nodes"]) == sorted([*TRACED, BARE, LATER])
    run_ids = {host: shown["AUTOPROF_RUN_ID"] for host, shown in result["environment"].items()}
    assert run_ids == dict.fromkeys([*TRACED, BARE, LATER], windowed.path.name)
    assert result["before"]["node-b"] != result["after"]["node-b"]
    captures = runs.step(windowed.spread.run(), 3).captures
    (restarted,) = [capture for capture in captures if capture.meta.host == "node-b"]
    assert restarted.meta.pid == result["after"]["node-b"]
    assert hosts(windowed.spread.run(), 3) == sorted([*TRACED, LATER])


def test_collect_brings_the_parts_of_all_nodes(windowed: Windowed) -> None:
    assert windowed.before == [DRIVER]
    assert windowed.collected.returncode == 0, windowed.collected.stdout + windowed.collected.stderr
    run = windowed.spread.run()
    assert hosts(run, 2) == sorted(TRACED)
    assert {capture.state for capture in run.captures} == {"complete"}
    states = {node["host"]: node["state"] for node in json.loads(windowed.collected.stdout)["nodes"]}
    collected = dict.fromkeys(["node-b", "node-c", LATER], "collected")
    assert states == {DRIVER: "here", BARE: "no autoprof", **collected}
    for capture in run.captures:
        folder = RunDir(windowed.path).step(capture.meta.step)
        json.loads(gzip.decompress((folder / f"{capture.name}.pt.trace.json.gz").read_bytes()))


def test_run_json_lists_all_hosts(windowed: Windowed) -> None:
    assert windowed.before_collect.hosts == [DRIVER]
    info = windowed.spread.run().info
    assert (info.hosts, info.state) == (sorted([*TRACED, LATER]), "ended")
    assert sorted(node.host for node in info.nodes) == sorted([*TRACED, LATER])
    assert info.versions["ray"]


def test_a_node_without_autoprof_runs_the_users_method(windowed: Windowed) -> None:
    assert windowed.result["after"][BARE] is not None


def test_collected_files_are_not_fetched_again(windowed: Windowed) -> None:
    again = json.loads(windowed.again.stdout)
    assert windowed.again.returncode == 0
    assert sum(node["fetched"] for node in again["nodes"]) == 0
    assert sum(node["files"] for node in again["nodes"]) > 0


def test_a_merged_trace_of_all_hosts_uses_the_drivers_clock(windowed: Windowed) -> None:
    merged = windowed.spread.autoprof("merge", "--step", "3")
    assert merged.returncode == 0, merged.stderr
    folder = RunDir(windowed.path).step(3)
    trace = json.loads(gzip.decompress((folder / "merged.pt.trace.json.gz").read_bytes()))
    named = {event["pid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    measured = clocks.read_offsets(windowed.path)
    assert measured.driver == DRIVER
    assert sorted(measured.offsets) == sorted({*TRACED, BARE, LATER} - {DRIVER})
    for capture in runs.step(windowed.spread.run(), 3).captures:
        host = capture.meta.host
        own = json.loads(gzip.decompress((folder / f"{capture.name}.pt.trace.json.gz").read_bytes()))
        (theirs,) = ranges(own)
        (here,) = [event for event in ranges(trace) if re.search(rf"\b{host}\b", named[event["pid"]])]
        moved = absolute_ns(trace, here) - absolute_ns(own, theirs)
        offset = clocks.offset_ns(measured, host, capture.meta.clock.start.unix_ns)
        assert abs(moved + offset) < 2000
        assert (offset == 0) == (host == DRIVER)
    groups = " ".join(named.values())
    assert {host for host in [*TRACED, LATER] if host in groups} == {*TRACED, LATER}


def ranges(trace: dict[str, Any]) -> list[dict[str, Any]]:
    events = trace["traceEvents"]
    return [
        event
        for event in events
        if event.get("name") == "actor.update_actor" and event.get("cat") in ("user_annotation", "cpu_op")
    ]


def absolute_ns(trace: dict[str, Any], event: dict[str, Any]) -> float:
    return int(trace.get("baseTimeNanoseconds", 0)) + float(event["ts"]) * 1000


def test_collect_copies_to_an_fsspec_url(windowed: Windowed, tmp_path: Path) -> None:
    target = f"file://{tmp_path}/there"
    copied = windowed.spread.autoprof("collect", "--ray", windowed.spread.cluster.address, "--to", target)
    assert copied.returncode == 0, copied.stdout + copied.stderr
    run = runs.read(tmp_path / "there" / windowed.path.name)
    assert hosts(run, 2) == sorted(TRACED)
    assert not list((tmp_path / "there").rglob("*.part"))


@pytest.fixture(scope="module")
def lossy(windowed: Windowed) -> tuple[Spreading, dict[str, Any], str]:
    """Run with AUTOPROF_COLLECT, in which a node is killed during the window."""
    spread = windowed.spread

    def kill() -> None:
        wait_for(spread.folder / "inside", 200)
        spread.cluster.kill(LATER)

    command = (
        f'echo "$AUTOPROF_RUN_DIR" $(ls "$AUTOPROF_RUN_DIR"/global_step_000002 | wc -l) >> {spread.folder}/finished'
    )
    result, output = spread.drive("loss", kill, AUTOPROF_STEPS="2", AUTOPROF_COLLECT="1", AUTOPROF_ON_FINISH=command)
    return spread, result, output


@pytest.mark.fault("a node is killed during a window", "continues; the rest is collected", "the files of that node")
def test_a_node_killed_during_the_window_is_named_and_the_rest_is_complete(lossy: Any) -> None:
    spread, result, output = lossy
    assert result["after"][LATER] is None
    run = spread.run()
    assert hosts(run, 2) == sorted(TRACED)
    assert {capture.state for capture in run.captures} == {"complete"}
    assert f"collecting is not complete: {LATER} ({result['nodes'][LATER][:8]}): the node has died" in output
    collected = json.loads((Path(run.path) / file_names.COLLECTED).read_text())
    assert {node["host"]: node["state"] for node in collected["nodes"]}[LATER] == "dead"
    assert run.info.hosts == sorted(TRACED)
    shell = spread.autoprof("collect", run.id, "--ray", spread.cluster.address)
    assert shell.returncode == 1
    assert f"missing: {LATER}" in shell.stdout


def test_the_command_runs_once_when_all_is_collected(lossy: Any) -> None:
    spread, _, _ = lossy
    (line,) = wait_for_line(spread.folder / "finished").splitlines()
    # One trace and one meta file of each host.
    assert line.split() == [spread.run().path, str(2 * len(TRACED))]


@pytest.mark.usefixtures("thorough")
def test_a_trigger_through_ray_waits_for_the_files_of_all_nodes_and_prints_their_paths(lossy: Any) -> None:
    spread, _, _ = lossy
    known = {run.name for run in spread.runs.iterdir()}
    asked = []

    def ask() -> None:
        deadline = time.monotonic() + 200
        try:
            while not [run for run in spread.runs.glob("*/journal/*.jsonl") if run.parts[-3] not in known]:
                assert time.monotonic() < deadline
                time.sleep(0.2)
            asked.append(spread.autoprof("trigger", "--ray", spread.cluster.address, "--steps", "2", "--wait"))
            asked.append(spread.autoprof("stacks", "--ray", spread.cluster.address, "--wait", "60", "--json"))
        finally:
            (spread.folder / "enough").touch()

    spread.drive("asked", ask, AUTOPROF_STEPS="")
    triggered, stacks = asked
    assert triggered.returncode == 0, triggered.stdout + triggered.stderr
    assert stacks.returncode == 0, stacks.stdout + stacks.stderr
    answers = json.loads(stacks.stdout)
    # The driver and the workers answer; the files stay on their nodes.
    by_host = {each["host"]: each for each in answers["processes"] if each["process"].startswith("ray::Worker")}
    assert {DRIVER, "node-b", "node-c"} <= set(by_host)
    assert {each["by"] for each in by_host.values()} == {"itself"}
    assert {folder.partition(":")[0] for folder in answers["folders"]} >= {DRIVER, "node-b", "node-c"}
    lines = triggered.stdout.splitlines()
    run = spread.run()
    (first, second) = [step.number for step in run.steps]
    assert second == first + 1
    assert re.fullmatch(r"captures: 6, [0-9.]+ [kM]B", lines[-7])
    places = [f"{host}:{run.path}/global_step_{step:06d}" for step in (first, second) for host in TRACED]
    assert sorted(lines[-6:]) == sorted(places)
    # The files are still on their nodes: nothing has collected them.
    assert hosts(run, first) == [DRIVER]
    assert spread.autoprof("collect", "--ray", spread.cluster.address).returncode == 0
    assert hosts(spread.run(), first) == hosts(spread.run(), second) == sorted(TRACED)
