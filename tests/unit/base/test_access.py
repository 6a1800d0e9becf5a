"""Access to a run's files, and names of captures whose names were taken."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autoprof.base import files, identity, process
from autoprof.capture.artifacts import Subject
from autoprof.run.journal import HookLog, Span, Timeline
from autoprof.run.runtime import Runtime
from autoprof.rundir import file_names, layout
from autoprof.rundir.layout import RunDir
from tests.support.captures import SUBJECT, begun, finished, work
from tests.support.helpers import processes_of


@pytest.fixture(autouse=True)
def _private_again() -> Iterator[None]:
    yield
    files.open_to_group(False)


@pytest.fixture(params=[0o000, 0o022, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def record(run: Runtime, subject: Subject = SUBJECT) -> None:
    recording = begun(run, subject)
    work()
    recording.stop()


def leave_everything(run: Runtime) -> None:
    record(run)
    finished(run)
    Span(run.timeline, "step", "step", step=1, role="trainer", rank=0).end()
    layout.write_json(run.rundir.run_json, run.describe())
    layout.write_json(run.rundir.control / "x.json", {})


def modes(path: Path) -> dict[str, set[int]]:
    """Return the permissions of all folders and of all files."""
    found: dict[str, set[int]] = {"folders": {stat.S_IMODE(path.stat().st_mode)}, "files": set()}
    for place in path.rglob("*"):
        found["folders" if place.is_dir() else "files"].add(stat.S_IMODE(place.stat().st_mode))
    return found


@pytest.mark.parametrize(("access", "folders", "files"), [("private", 0o700, 0o600), ("group", 0o750, 0o640)])
def test_a_run_is_readable_for_its_user_and_if_asked_for_its_group(
    made: Any, umask: int, access: str, folders: int, files: int
) -> None:
    run = made(access=access)
    leave_everything(run)
    assert modes(run.rundir.path) == {"folders": {folders}, "files": {files}}


@pytest.mark.parametrize("access", ["private", "group"])
def test_folders_above_those_of_the_runs_keep_the_mode_of_the_umask(tmp_path: Path, umask: int, access: str) -> None:
    files.open_to_group(access == "group")
    RunDir(tmp_path / "results" / "all" / "runs" / "run").make(tmp_path / "results/all/runs/run/hooks")
    found = [stat.S_IMODE(path.stat().st_mode) for path in sorted((tmp_path / "results").rglob("*")) if path.is_dir()]
    own, above = (0o750, 0o050) if access == "group" else (0o700, 0)
    assert found == [0o777 & ~umask | above, own, own, own]
    assert stat.S_IMODE((tmp_path / "results").stat().st_mode) == 0o777 & ~umask | above


def test_what_is_made_later_goes_by_the_runs_folder(tmp_path: Path, umask: int) -> None:
    for allowed, expected in ((0o750, 0o640), (0o700, 0o600)):
        run = tmp_path / f"{allowed}"
        run.mkdir()
        run.chmod(allowed)
        files.open_as(run)
        layout.write_json(run / "x.json", {})
        assert stat.S_IMODE((run / "x.json").stat().st_mode) == expected


@pytest.mark.fault("a container starts anew: same host, same pid", "goes on", "nothing")
def test_a_trace_that_is_there_is_not_overwritten_by_a_process_with_the_same_pid(made: Any) -> None:
    run = made()
    record(run)
    first = {name: (run.rundir.step(2) / f"{name}{file_names.TRACE}").read_bytes() for name in finished(run)}
    # A restarted container has the same host and pid, and the process has no memory of earlier captures.
    process.reset()
    record(run)
    found = finished(run)
    assert sorted(name.split(".rank3")[0] for name in found) == ["actor.update_actor", "actor.update_actor.2"]
    assert all(
        (run.rundir.step(2) / f"{name}{file_names.TRACE}").read_bytes() == trace for name, trace in first.items()
    )


def test_a_capture_that_was_cut_off_keeps_its_name(made: Any) -> None:
    run = made()
    run.rundir.step(2).mkdir(parents=True)
    cut_off = run.rundir.step(2) / f"{SUBJECT.file_name(1)}{file_names.TAKEN}"
    cut_off.touch()
    record(run)
    assert [name.split(".rank3")[0] for name in finished(run)] == ["actor.update_actor.2"]
    assert cut_off.exists()


def test_stages_whose_names_are_the_same_when_tidied_have_files_of_their_own(made: Any) -> None:
    run = made()
    for stage in ("a.b", "a/b"):
        record(run, Subject(step=2, role="actor", stage=stage, rank=0))
    assert sorted(meta["stage"] for meta, _ in finished(run).values()) == ["a.b", "a/b"]


def test_the_hooks_of_a_process_that_had_the_pid_before_are_kept(made: Any) -> None:
    run = made()
    for _ in range(2):
        timeline = Timeline(run.rundir)
        log = HookLog(run.rundir, timeline, lambda: None, lambda: None)
        log._worth_writing = True
        log.error("x", "first")
        log.error("x", "second")
        timeline.close()
    processes = processes_of(run.rundir.path)
    assert sorted(path.name for path in run.rundir.lines("journal")) == [
        f"{identity.HOST}-{os.getpid()}{again}.jsonl" for again in (".2", "")
    ]
    assert [process["errors"]["x"]["count"] for process in processes] == [2, 2]


@pytest.mark.fault("names of roles such as ../../x, or 300 long", "goes on", "nothing; they are file names")
@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "a\0b", "a\nb", "x" * 300, "\N{GRINNING FACE}", "\x1b[31mred", "..", "", "%s{}"]
)
def test_names_of_roles_and_stages_are_no_paths(made: Any, name: str) -> None:
    run = made()
    record(run, Subject(step=2, role=name, stage=name, rank=0))
    ((found, (meta, trace)),) = finished(run).items()
    assert (meta["role"], meta["state"]) == (name, "complete")
    assert trace is not None
    assert len(found.encode()) < 220
    assert found.isascii()
    assert found.isprintable()
    assert {path.parent for path in run.rundir.path.rglob(f"*{file_names.META}")} == {run.rundir.step(2)}


def test_long_names_that_differ_at_their_end_stay_apart() -> None:
    assert file_names.tidy("x" * 300 + "a") != file_names.tidy("x" * 300 + "b")
    assert file_names.tidy("x" * 60) == "x" * 60
