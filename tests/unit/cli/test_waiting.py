"""Output of `autoprof trigger --wait` for runs on several disks, with captures that fail and files that are left."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pytest_mock import MockerFixture

from autoprof.cli import nodes
from autoprof.cli import trigger as trigger_wait
from autoprof.cli.documents import Triggered
from autoprof.cli.trigger import GaveUp, View
from autoprof.rundir.file_names import META, PART
from autoprof.rundir.layout import RunDir, write_json
from autoprof.windows import requests
from autoprof.windows.requests import Became, Trigger

NAME = "1-2-0123abcd.json"


class Nodes:
    """Hosts with a disk each, or one disk that is seen from several; the first counts the steps."""

    pause_s = 0.01

    def __init__(self, *places: tuple[str, RunDir]) -> None:
        self.places = places
        self.alive = True

    def look(self, steps: Sequence[int] = ()) -> list[View]:
        told = [{**nodes.look(str(run.path), list(steps)), "host": host} for host, run in self.places]
        told[0]["alive"] = self.alive
        return msgspec.convert(told, list[View])


@pytest.fixture
def disk(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "one" / "run")
    write_json(run.run_json, {"state": "running"})
    return run


def captured(run: RunDir, step: int, name: str, **meta: Any) -> None:
    write_json(run.step(step) / f"{name}{META}", {"state": "complete", "bytes": 1500} | meta)


def done(run: RunDir, *steps: int, **values: Any) -> None:
    requests.note(run, NAME, Trigger(), Became(state="done", captured=list(steps), **values))


def wait(nodes: Nodes) -> None:
    trigger_wait.wait_for_files(nodes, Trigger(steps=1), Triggered(run="run", request=NAME))


@pytest.mark.parametrize("shared", [True, False])
def test_folders_are_named_with_their_host_where_disks_are_several(
    shared: bool, disk: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = disk if shared else RunDir(tmp_path / "two" / "run")
    done(disk, 7)
    captured(disk, 7, "actor.update_actor.rank0.one.pid1")
    captured(other, 7, "actor.update_actor.rank1.two.pid1")
    wait(Nodes(("one", disk), ("two", other)))
    lines = capsys.readouterr().out.splitlines()
    if shared:
        assert lines[-2:] == ["captures: 2, 3.0 kB", str(disk.step(7))]
    else:
        assert lines[-3:] == ["captures: 2, 3.0 kB", f"one:{disk.step(7)}", f"two:{other.step(7)}"]


def test_a_capture_that_is_not_complete_is_named(disk: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    done(disk, 7)
    captured(disk, 7, "actor.update_actor.rank0.one.pid1")
    captured(disk, 7, "ref.log_prob.rank0.one.pid1", state="truncated", reason="it grew past AUTOPROF_MAX_TRACE_MB")
    with pytest.raises(GaveUp, match="not all captures are complete; see autoprof doctor RUN"):
        wait(Nodes(("one", disk)))
    said = capsys.readouterr().out
    assert "step 7, ref.log_prob.rank0.one.pid1: truncated, it grew past AUTOPROF_MAX_TRACE_MB\n" in said
    assert said.endswith(f"captures: 2, 3.0 kB\n{disk.step(7)}\n")


def test_steps_without_a_capture_are_a_problem(disk: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    done(disk, 7)
    with pytest.raises(GaveUp):
        wait(Nodes(("one", disk)))
    assert "none of the steps has a capture\n" in capsys.readouterr().out


@pytest.mark.parametrize("alive", [True, False])
def test_a_file_that_nobody_writes_any_more_is_not_waited_for(
    alive: bool, disk: RunDir, mocker: MockerFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    mocker.patch.object(trigger_wait, "_FILE_S" if alive else "_AFTER_S", 0.2)
    done(disk, 7)
    captured(disk, 7, "actor.update_actor.rank0.one.pid1")
    left = disk.step(7) / f"ref.log_prob.rank0.one.pid1.pt.trace.json{PART}"
    left.touch()
    nodes = Nodes(("one", disk))
    nodes.alive = alive
    with pytest.raises(GaveUp):
        wait(nodes)
    said = capsys.readouterr().out
    assert "files that are still being written: 1\n" in said
    assert f"{left}: it is incomplete and no longer grows\n" in said


def test_what_became_of_a_request_may_be_anything(disk: RunDir) -> None:
    """A file may have content that no driver writes."""
    write_json(Path(f"{disk.control / NAME}.taken"), {"became": {"state": 1}})
    nodes = Nodes(("one", disk))
    nodes.alive = False
    with pytest.raises(GaveUp, match="the run has ended"):
        wait(nodes)
