"""Times of clock measurements, and their errors. tests/real/test_ray_clocks.py tests the measurement itself."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from autoprof.run import clocks
from autoprof.run.runtime import Runtime
from autoprof.rundir.records import Offset


@pytest.fixture
def run(joined: Callable[..., Runtime]) -> Iterator[Runtime]:
    yield joined()
    clocks.stop()


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A Ray cluster of three nodes, one of them dead."""
    nodes = [{"NodeID": name, "Alive": name != "dead"} for name in ("here", "there", "dead")]
    ray = SimpleNamespace(
        is_initialized=lambda: True,
        nodes=lambda: nodes,
        get_runtime_context=lambda: SimpleNamespace(get_node_id=lambda: "here"),
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    return ray


def lines(run: Runtime) -> list[dict[str, Any]]:
    path = run.rundir.process_file("clocks", ".jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def measure(run: Runtime) -> None:
    clocks.measure(run.rundir, run.hooks)
    if clocks._state.thread is not None:
        clocks._state.thread.join()


def test_other_nodes_that_live_are_asked_once_a_minute(
    run: Runtime, cluster: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def offsets(ray: object, nodes: list[str]) -> list[Offset]:
        assert threading.current_thread() is not threading.main_thread()
        asked.append(nodes)
        return [Offset(host="n2", offset_ns=-5, error_ns=3, unix_ns=len(asked))]

    monkeypatch.setattr(clocks, "offsets", offsets)
    measure(run)
    measure(run)
    assert asked == [["there"]]
    # A node that joins meanwhile is not measured.
    cluster.nodes().append({"NodeID": "new", "Alive": True})
    measure(run)
    assert asked[1:] == [["new"]]
    clocks._state.asked_at["there"] -= clocks._REPEAT_AFTER_S
    measure(run)
    assert asked[2:] == [["there"]]
    assert lines(run) == [{"host": "n2", "offset_ns": -5, "error_ns": 3, "unix_ns": number} for number in (1, 2, 3)]


def test_without_ray_nothing_happens(run: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False))
    measure(run)
    monkeypatch.delitem(sys.modules, "ray")
    measure(run)
    assert clocks._state.thread is None


@pytest.mark.fault("a node's clock can't be measured", "goes on", "the node's offset")
def test_an_error_is_kept_in_the_log_of_hooks(
    run: Runtime, cluster: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offsets(*_: object) -> list[Offset]:
        raise RuntimeError("the head has gone")

    monkeypatch.setattr(clocks, "offsets", offsets)
    measure(run)
    (error,) = run.hooks.errors.values()
    assert (error.where, error.count, error.last) == ("clocks", 1, "RuntimeError: the head has gone")
    assert lines(run) == []


def test_a_clock_that_is_known_badly_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = {"near": [3], "busy": [9_000_000, 12_000_000, 1_000_000, 1], "far": [8_000_000] * 20, "gone": [7_000_000]}

    def node(ray: object, call: str, name: str, host: object) -> Offset:
        return Offset(host=name, offset_ns=0, error_ns=errors[name].pop(0), unix_ns=1)

    monkeypatch.setattr(clocks, "_measure_node", node)
    monkeypatch.setattr(clocks, "_PAUSE_S", 0.0)
    monkeypatch.setattr(
        clocks.cluster, "on_node", lambda task, node, name: SimpleNamespace(remote=lambda function: node)
    )
    ray = SimpleNamespace(
        remote=lambda ask: ask,
        wait=lambda waiting, **_: (waiting[:1], waiting[1:]),
        exceptions=SimpleNamespace(RayError=IndexError),
    )
    found = {each.host: each.error_ns for each in clocks.offsets(ray, list(errors))}
    assert found == {"near": 3, "busy": 1_000_000, "far": 8_000_000, "gone": 7_000_000}
    assert len(errors["far"]) == 20 - 1 - clocks._ROUNDS
