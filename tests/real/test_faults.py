"""Faults in real runs of verl, which must not change the training.

`make faults` makes all of these runs and prints a table. `make test` makes only the first run, which has most of the
faults, one in each step.
"""

from __future__ import annotations

import gzip
import json
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.real.run_table import FAULTS, ON, WHOLE
from tests.support.helpers import autoprof
from tests.support.verl_runs import VerlRun, verl_run


def faulty_run(folder: Path, faults: str, status: int = 0, **variables: str) -> VerlRun:
    """Run verl with these faults."""
    return verl_run(folder, *WHOLE, packages=[FAULTS], status=status, FAULTS=faults, **variables)


def first_four(off: VerlRun) -> dict[int, dict[str, str]]:
    """Return the metrics of steps 1 to 4 of a longer run."""
    return {step: off.metrics[step] for step in range(1, 5)}


def metas(run: VerlRun, step: int) -> dict[str, tuple[str, str]]:
    """Return state and reason of each capture of a step, by role and stage."""
    found = {}
    for path in sorted(run.step_folder(step).glob("*.meta.json")):
        meta = json.loads(path.read_text())
        name = f"{meta['role']}.{meta['part'] or meta['stage']}"
        found[name] = (meta["state"], meta["reason"])
    return found


def all_is_whole(run: VerlRun) -> None:
    """Assert that all files with a final name are complete, and that the meta files are true."""
    for path in run.directory.rglob("*.json"):
        json.loads(path.read_text())
    for path in run.directory.rglob("*.gz"):
        assert msgspec.json.decode(gzip.decompress(path.read_bytes()))["traceEvents"]
        meta = json.loads(Path(str(path).replace(".pt.trace.json.gz", ".meta.json")).read_text())
        assert meta["state"] in ("complete", "truncated")
        assert meta["bytes"] == path.stat().st_size
    for path in run.directory.rglob("*.meta.json"):
        there = Path(str(path).replace(".meta.json", ".pt.trace.json.gz")).exists()
        assert there == (json.loads(path.read_text())["state"] != "failed"), path


def errors(run: VerlRun) -> dict[str, str]:
    """Return autoprof's own errors in all processes, by hook."""
    return {where: error["last"] for process in run.processes for where, error in process["errors"].items()}


def listed(run: VerlRun) -> str:
    """Return the output of `autoprof ls` for the run."""
    return autoprof("ls", str(run.directory), cwd=run.folder).stdout


def hooks(run: VerlRun, key: str) -> set[str]:
    """Return the states of a hook in the processes of a run."""
    return {process["hooks"][key]["state"] for process in run.processes if key in process["hooks"]}


@pytest.mark.fault("all of verl's faults below", "continues, same metrics in all steps", "see below")
def test_training_is_the_same_with_all_faults(faulty: VerlRun, v1_off: VerlRun) -> None:
    assert sorted(faulty.metrics) == [1, 2, 3, 4, 5, 6]
    assert faulty.metrics == v1_off.metrics
    assert all(len(metrics) > 40 for metrics in faulty.metrics.values())
    assert faulty.finished.left_behind == []
    assert "Traceback" not in faulty.finished.output
    all_is_whole(faulty)


@pytest.mark.fault(
    "a hook raises, before and after the call", "continues, same metrics", "one capture; another is `truncated`"
)
def test_a_hook_that_raises_costs_its_capture(faulty: VerlRun) -> None:
    found = metas(faulty, 1)
    assert "autoprof: verl/compute-log-prob: RuntimeError: injected before the call" in faulty.finished.output
    assert "autoprof: verl/compute-ref-log-prob: RuntimeError: injected after the call" in faulty.finished.output
    assert found["ref.compute_ref_log_prob"] == ("truncated", "autoprof failed in verl/compute-ref-log-prob")
    assert "actor.compute_log_prob" not in found
    assert found["trainer.compute_advantage"] == ("complete", "")


@pytest.mark.fault(
    "torch's profiler does not start", "continues, same metrics", "the traces; meta files say `failed` and why"
)
def test_a_profiler_that_does_not_start_is_reported(faulty: VerlRun) -> None:
    found = metas(faulty, 2)
    assert {"actor.compute_log_prob", "actor.update_actor", "rollout.rank0"} <= set(found)
    problem = ("failed", "the profiler did not start: RuntimeError: injected at the start")
    assert {name: meta for name, meta in found.items() if meta != problem} == {}


@pytest.mark.fault(
    "the engine's stop hangs for 20 minutes", "continues after the time-out", "nothing; a trace is `truncated`"
)
def test_a_stop_that_hangs_is_abandoned_after_the_time_out(faulty: VerlRun) -> None:
    found = metas(faulty, 5)
    assert found["rollout.rank0"] == ("truncated", "the engine's own stop did not reach the worker")
    assert found["actor.update_actor"] == ("complete", "")
    begin, end = faulty.step_window(5)
    assert end - begin < 120e9


@pytest.mark.fault(
    "a file in place of a step's folder", "continues, same metrics", "the step's traces; a warning on stderr"
)
def test_a_step_folder_that_can_not_be_made_costs_the_traces_of_its_step(faulty: VerlRun) -> None:
    assert faulty.step_folder(6).read_text() == "in the way"
    assert any(error.startswith("FileExistsError") for error in errors(faulty).values())


@pytest.mark.fault(
    "a hooked module, class or method is gone", "continues, same metrics", "nothing; it is `skipped`, with the reason"
)
def test_hooks_of_missing_modules_classes_and_methods_are_skipped(faulty: VerlRun) -> None:
    assert hooks(faulty, "verl/no-module") == {"skipped"}
    assert hooks(faulty, "verl/no-class") == {"skipped"}
    assert hooks(faulty, "verl/no-method") == {"skipped"}
    assert "has no no (path no.such.rank)" in errors(faulty)["verl/no-parameter"]


@pytest.fixture
def small_disk(thorough: None, tmp_path: Path) -> Any:
    """Mount a disk of 3 MB."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", place]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a disk")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


@pytest.mark.fault(
    "the disk is full (3 MB)", "continues, same metrics", "traces that do not fit; `failed` if a meta file fits"
)
def test_a_full_disk_costs_traces(small_disk: Path, tmp_path: Path, v1_off: VerlRun) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    run = faulty_run(folder, "none", AUTOPROF_DIR=str(small_disk), AUTOPROF_MIN_FREE_MB="0.001", **ON)
    left = VerlRun(small_disk.parent, run.finished, run.probe)
    left.__dict__["directory"] = (small_disk / "latest").resolve()
    assert run.metrics == first_four(v1_off)
    states = {state for step in (2, 4) for state, _ in metas(left, step).values()}
    assert "failed" in states
    all_is_whole(left)


@pytest.mark.fault(
    "free space is below the limit", "continues, same metrics", "the traces; meta files say `failed` and why"
)
def test_no_trace_is_recorded_if_free_space_is_below_the_limit(thorough: None, tmp_path: Path, v1_off: VerlRun) -> None:
    run = faulty_run(tmp_path, "none", AUTOPROF_MIN_FREE_MB="1000000000", **ON)
    assert run.metrics == first_four(v1_off)
    found = metas(run, 2) | metas(run, 4)
    assert {state for state, _ in found.values()} == {"failed"}
    assert all("free and needs" in reason for _, reason in found.values())


@pytest.mark.fault(
    "the run directory can't be written", "continues, same metrics", "autoprof's files; a warning on stderr"
)
def test_a_folder_that_can_not_be_written_is_reported(thorough: None, tmp_path: Path, v1_off: VerlRun) -> None:
    run = faulty_run(tmp_path, "none", AUTOPROF_DIR="/proc/1/nowhere", **ON)
    assert run.metrics == first_four(v1_off)
    assert "can't write to /proc/1/nowhere/" in run.finished.output
    assert "Traceback" not in run.finished.output


@pytest.mark.fault("Ray's workers on nodes without autoprof", "continues, same metrics", "the captures there")
def test_workers_without_autoprof_work(thorough: None, tmp_path: Path, v1_off: VerlRun) -> None:
    run = faulty_run(tmp_path, "without-autoprof", **ON)
    assert run.metrics == first_four(v1_off)
    assert not list(run.directory.glob("global_step_*"))


@pytest.mark.fault("a worker is killed during a window", "ends as without autoprof", "the capture in progress")
def test_a_killed_worker_keeps_its_complete_captures(thorough: None, tmp_path: Path) -> None:
    on, off = tmp_path / "on", tmp_path / "off"
    for folder in (on, off):
        folder.mkdir()
    without = faulty_run(off, "killed@2", status=1)
    run = faulty_run(on, "killed@2", status=1, **ON)
    assert run.finished.status == without.finished.status == 1
    assert sorted(run.metrics) == [1]
    assert run.metrics == without.metrics
    assert metas(run, 2)["actor.compute_log_prob"] == ("complete", "")
    assert "actor.update_actor" not in metas(run, 2)
    all_is_whole(run)
    examined = autoprof("doctor", str(run.directory), cwd=run.folder)
    assert "Traceback" not in examined.stderr
    assert "actor rank 0 vanished in update_actor of step 2" in examined.stdout
    assert "actor.update_actor" in examined.stdout
    assert "unfinished" in listed(run)
