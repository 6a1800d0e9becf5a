"""`autoprof trigger --ray`: requests to a run in a real cluster, and waits for it, only through Ray."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.helpers import wait_for
from tests.support.ray_clusters import Asked, cluster, going_on

__all__ = ["cluster"]


@pytest.fixture(scope="module")
def asked(cluster: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    """Run in progress in an existing cluster."""
    with going_on(tmp_path_factory.mktemp("asked"), cluster) as asked:
        yield asked


def test_a_window_is_opened_and_waited_for(asked: Asked) -> None:
    done = asked.trigger("--steps", "2", "--wait", "--contents", "cpu")
    assert (done.returncode, done.stderr) == (0, asked.connected)
    lines = done.stdout.splitlines()
    assert re.fullmatch(
        rf"asked run {asked.run.name} on \S+ for the next 2 steps, in {asked.run}/control/\S+", lines[0]
    )
    steps = asked.steps()[-2:]
    assert lines[-3].startswith("captures: 2, ")
    assert lines[-2:] == [str(asked.run / step) for step in steps]
    for step in steps:
        assert len(list((asked.run / step).glob("actor.update_actor.rank0.*.pt.trace.json.gz"))) == 1
    # The commands did not start a run.
    assert list((asked.folder / "elsewhere").iterdir()) == []


def test_stacks_are_requested_through_ray(asked: Asked) -> None:
    done = asked.shell("--json", command="stacks")
    with done:
        output, errors = done.communicate(timeout=120)
    assert (done.returncode, errors) == (0, asked.connected)
    answer = json.loads(output)
    (folder,) = answer["folders"]
    assert Path(folder.partition(":")[2]).parent == asked.run / "stacks"
    # The driver has called no hook, so it does not answer itself.
    by_process = {each["process"].partition(".")[0]: each for each in answer["processes"]}
    trainer, worker = by_process["ray::Trainer"], by_process["ray::Worker"]
    assert (trainer["by"], worker["by"]) == ("itself", "itself")
    functions = [frame["function"] for thread in trainer["threads"] for frame in thread["frames"]]
    assert "Trainer.fit" in functions
    assert not [name for name in functions if name == "autoprof_wrapper"]
    assert {each["reason"] for each in answer["absent"]} <= {"none of autoprof's hooks was called in it"}
    # The run continues.
    assert asked.trigger("--steps", "1", "--wait").returncode == 0


def test_the_start_of_a_runs_id_is_enough(asked: Asked) -> None:
    before = asked.steps()
    done = asked.trigger(asked.run.name[:-2], "--wait")
    assert done.returncode == 0, done.stderr
    assert len(asked.steps()) == len(before) + 1
    unknown = asked.trigger("1999", "--wait")
    assert unknown.returncode == 1
    assert f"no run matches '1999' in this cluster; there are {asked.run.name}" in unknown.stderr


def test_a_run_is_switched_off_and_on(asked: Asked) -> None:
    assert asked.trigger("--off").returncode == 0
    wait_for(asked.run / "control" / "off")
    refused = asked.trigger("--wait")
    assert refused.returncode == 1
    assert "is switched off in run" in refused.stderr
    assert asked.trigger("--on").returncode == 0
    deadline = time.monotonic() + 60
    while (asked.run / "control" / "off").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert asked.trigger("--wait").returncode == 0


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("not an address", "can't connect to the Ray cluster at 'not an address': "),
        ("127.0.0.1:1", "no Ray cluster at '127.0.0.1:1': nothing answers there (Connection refused)"),
        ("127.0.0.1:99999", "no Ray cluster at '127.0.0.1:99999': nothing answers there ("),
    ],
)
def test_a_wrong_address_is_reported(asked: Asked, address: str, why: str) -> None:
    wrong = Asked.__new__(Asked)
    wrong.folder, wrong.address = asked.folder, address
    done = wrong.trigger()
    assert done.returncode == 1
    assert done.stderr.startswith(f"autoprof: trigger: --ray: {why}")


def test_a_run_that_has_ended_gets_no_requests_and_ends_waits(asked: Asked) -> None:
    name = asked.run.name
    with asked.waited_for() as shell:
        (asked.folder / "enough").touch()
        errors = shell.communicate(timeout=120)[1]
    assert (shell.returncode, errors) == (1, f"{asked.connected}autoprof: trigger: the run has ended\n")
    done = asked.trigger()
    assert done.returncode == 1
    assert f"is running in this cluster; there are {name}" in done.stderr
    done = asked.trigger(name)
    assert done.returncode == 1
    assert f"run {name} is not running: its trainer's process has ended" in done.stderr


def test_the_end_of_a_cluster_with_its_run_is_reported(tmp_path: Path) -> None:
    with going_on(tmp_path, "local") as asked, asked.waited_for() as shell:
        (asked.folder / "enough").touch()
        errors = shell.communicate(timeout=120)[1]
    assert shell.returncode == 1
    assert "autoprof: trigger: the run has ended" in errors
