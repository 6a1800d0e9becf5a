"""Detection of trigger requests: `control/` is listed only after a change, and Ray's store has a bell."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec
import pytest
from pytest_mock import MockerFixture

from autoprof.base import files
from autoprof.run import cluster
from autoprof.rundir import layout
from autoprof.rundir.layout import RunDir
from autoprof.windows import requests
from autoprof.windows.requests import Bell, Folder, Trigger
from autoprof.windows.trigger_windows import OpenTriggers

# Seconds after which the times of two files differ.
LATER_S = 3.0


class Clock:
    """Clock of this host, which stops between looks."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    def time_ns(self) -> int:
        # Names of requests are in the order of their times.
        return time.time_ns()


@pytest.fixture
def clock(mocker: MockerFixture) -> Clock:
    clock = Clock()
    mocker.patch.object(requests, "time", clock)
    return clock


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    return run


def settled(folder: Folder, run: RunDir, clock: Clock) -> None:
    """Look until no look lists the folder."""
    folder.look(run)
    clock.now += LATER_S
    assert folder.look(run)
    assert not folder.look(run)


def test_without_a_change_nothing_is_listed(run: RunDir, clock: Clock, mocker: MockerFixture) -> None:
    listed = mocker.spy(requests.os, "listdir")
    folder = Folder()
    settled(folder, run, clock)
    before = listed.call_count
    for _ in range(1000):
        clock.now += LATER_S
        assert not folder.look(run)
    assert listed.call_count == before


@pytest.mark.parametrize("change", ["comes", "goes", "is renamed", "is replaced"])
def test_what_comes_goes_or_is_renamed_is_seen(change: str, run: RunDir, clock: Clock) -> None:
    folder = Folder()
    requests.switch(run, off=True)
    settled(folder, run, clock)
    off = run.control / layout.OFF
    match change:
        case "comes":
            asked = requests.ask(run, Trigger()).name
            expected = sorted([asked, layout.OFF])
        case "goes":
            requests.switch(run, off=False)
            expected = []
        case "is renamed":
            off.rename(run.control / "on")
            expected = ["on"]
        case _:
            requests.switch(run, off=True)
            expected = [layout.OFF]
    assert folder.look(run)
    assert folder.names == expected


def test_what_comes_in_the_same_moment_as_a_change_is_seen_too(run: RunDir, clock: Clock) -> None:
    """With coarse times, a file shortly after another does not change the times of the folder."""
    folder = Folder()
    first = requests.ask(run, Trigger()).name
    assert folder.look(run)
    second = requests.ask(run, Trigger()).name
    # Such a file system keeps the same time.
    folder._mark = requests._mark(run.control)
    assert folder.look(run)
    assert folder.names == [first, second]
    clock.now += LATER_S
    assert folder.look(run)
    assert not folder.look(run)


@pytest.mark.parametrize("there", [True, False])
def test_a_folder_that_is_not_there_or_goes_is_no_error(there: bool, tmp_path: Path, clock: Clock) -> None:
    run, folder = RunDir(tmp_path / "run"), Folder()
    if there:
        run.path.mkdir()
        requests.switch(run, off=True)
        settled(folder, run, clock)
        requests.switch(run, off=False)
        run.control.rmdir()
    assert folder.look(run)
    clock.now += LATER_S
    folder.look(run)
    assert not folder.look(run)
    assert folder.names == []
    requests.switch(run, off=True) if there else run.control.mkdir(parents=True)
    assert folder.look(run)


def test_a_file_system_whose_folders_do_not_tell_is_listed_each_time(
    run: RunDir, clock: Clock, mocker: MockerFixture
) -> None:
    folder = Folder()
    # Some object stores have no real folders and always show the same time.
    mocker.patch.object(requests, "_mark", return_value=(1, 1, 1, 1))
    mocker.patch.object(requests, "_updates_times", return_value=False)
    for _ in range(3):
        clock.now += LATER_S
        assert folder.look(run)
    requests.switch(run, off=True)
    assert folder.look(run)
    assert folder.names == [layout.OFF]


def test_whether_a_folder_tells_is_tried(run: RunDir, mocker: MockerFixture) -> None:
    assert requests._updates_times(run.control)
    assert list(run.control.iterdir()) == []
    mocker.patch.object(requests.os, "utime", side_effect=PermissionError)
    assert not requests._updates_times(run.control)
    mocker.stopall()
    mocker.patch.object(files, "create", side_effect=lambda path: os.open("/dev/null", os.O_RDONLY))
    assert not requests._updates_times(run.control)


def test_another_that_tries_it_hides_no_request(run: RunDir, clock: Clock) -> None:
    """The probe of another process resets the folder's time, and no request is missed."""
    folder = Folder()
    settled(folder, run, clock)
    requests._updates_times(run.control)
    settled(folder, run, clock)
    asked = requests.ask(run, Trigger()).name
    requests._updates_times(run.control)
    os.utime(run.control, (1, 1))
    assert folder.look(run)
    assert folder.names == [asked]


def test_a_control_that_is_a_link_is_not_followed(run: RunDir, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / layout.OFF).touch()
    run.control.symlink_to(tmp_path / "elsewhere")
    windows = OpenTriggers()
    windows.look(run, 0)
    assert not windows.off


class Store:
    """Stand-in for Ray's key-value store."""

    def __init__(self, mocker: MockerFixture) -> None:
        self.kept: dict[str, bytes] = {}
        mocker.patch.object(cluster, "is_up", return_value=True)
        mocker.patch.object(cluster, "put", self.kept.__setitem__)
        self.get = mocker.patch.object(cluster, "get", side_effect=self.kept.get)
        self.keys = mocker.patch.object(cluster, "keys", side_effect=self._keys)
        mocker.patch.object(cluster, "delete", lambda key: self.kept.pop(key, None) is not None)
        mocker.patch.object(requests, "register")

    def _keys(self, prefix: str) -> list[str]:
        return sorted(key for key in self.kept if key.startswith(prefix))

    def ask(self, name: str, content: bytes, ring: bytes = b"1") -> None:
        self.kept[requests.asked("run", name)] = content
        self.kept[requests.bell("run")] = ring


@pytest.fixture
def kept(mocker: MockerFixture) -> Store:
    return Store(mocker)


NAME = "1-2-0123abcd.json"


def test_without_a_ring_there_is_one_read_a_step(run: RunDir, kept: Store) -> None:
    bell = Bell()
    for step in range(1, 4):
        assert bell.take(run) == []
        assert kept.get.call_count == step
    kept.keys.assert_not_called()


def test_a_request_is_taken_when_the_bell_rings(run: RunDir, kept: Store) -> None:
    bell, another = Bell(), Bell()
    kept.ask(NAME, msgspec.json.encode(Trigger(run="run", steps=2)))
    assert bell.take(run) == [(NAME, Trigger(run="run", steps=2))]
    assert bell.take(run) == another.take(run) == []
    assert requests.asked("run", NAME) not in kept.kept


def test_what_is_no_request_of_ours_is_refused_through_ray_too(
    run: RunDir, kept: Store, caplog: pytest.LogCaptureFixture
) -> None:
    refused = {
        "1-1-00000000.json": (b"{", "Input data was truncated"),
        "1-1-00000001.json": (b'{"run": "another"}', "it is for run 'another'"),
        "1-1-00000002.json": (b'{"run": "run", "x": 1}', "Object contains unknown field `x`"),
        "1-1-00000003.json": (b" " * 70_000, "it has more than 65536 bytes"),
        "1-1-00000004.json": (b'{"run": "run", "switch": "x"}', "Invalid enum value 'x' - at `$.switch`"),
    }
    for name, (content, _) in refused.items():
        kept.ask(name, content)
    kept.ask("../../../1-1-00000005.json", b'{"run": "run"}')
    assert Bell().take(run) == []
    assert {name: each.reason for name, each in requests.states(run).items()} == {
        name: reason for name, (_, reason) in refused.items()
    }
    assert "a request through Ray is refused: its name is '../../../1-1-00000005.json'" in caplog.text
    assert list(run.path.parent.rglob("*00000005*")) == []
    assert [key for key in kept.kept if key.startswith("ask/")] == []


def test_a_store_that_fails_costs_the_request_and_not_the_step(
    run: RunDir, kept: Store, caplog: pytest.LogCaptureFixture
) -> None:
    kept.get.side_effect = ConnectionError("no head")
    assert Bell().take(run) == []
    assert "a trigger request sent through Ray can't be read: ConnectionError: no head" in caplog.text


def test_the_switch_is_thrown_through_ray_too(run: RunDir, kept: Store) -> None:
    windows = OpenTriggers()
    for number, switch in enumerate(("off", "on")):
        kept.ask(f"1-2-0000000{number}.json", msgspec.json.encode(Trigger(run="run", switch=switch)), switch.encode())
        windows.look(run, 0)
        assert windows.off == layout.switched_off(run) == (switch == "off")
    assert {each.state for each in requests.states(run).values()} == {"done"}
