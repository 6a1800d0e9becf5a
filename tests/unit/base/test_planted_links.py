"""Links and other files that another user put at the paths where autoprof writes: it never follows them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autoprof.base import files
from autoprof.capture import finisher, recorder
from autoprof.run.journal import Span
from autoprof.run.runtime import Runtime
from autoprof.rundir import layout
from tests.support.captures import SUBJECT, begun, finished, work
from tests.support.helpers import spans

PRECIOUS = '{"state": "theirs"}'


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """File of the user that is the target of links."""
    path = tmp_path / "precious"
    path.write_text(PRECIOUS)
    # The end of a run waits for files that were written lately.
    os.utime(path, (1, 1))
    return path


def record(run: Runtime) -> None:
    recording = begun(run)
    work()
    recording.stop()


def span(run: Runtime) -> None:
    Span(run.timeline, "step", "step", step=1, role="trainer", rank=0).end()


def name() -> str:
    return SUBJECT.file_name(1)


@pytest.mark.fault("a link is planted for a trace's file", "goes on", "nothing; the link's target is as it was")
@pytest.mark.parametrize(
    "ending",
    [
        ".pt.trace.json.part",
        ".pt.trace.json.part.tmp",
        ".pt.trace.json.gz.part",
        ".pt.trace.json.gz",
        ".meta.json",
        ".meta.json.part",
    ],
)
@pytest.mark.parametrize("moment", ["before", "while it records"])
def test_a_link_in_the_place_of_a_captures_file_is_not_followed(
    made: Any, theirs: Path, ending: str, moment: str
) -> None:
    run = made()
    folder = run.rundir.step(2)
    folder.mkdir(parents=True)
    if moment == "before":
        (folder / f"{name()}{ending}").symlink_to(theirs)
    recording = begun(run)
    link = folder / f"{name()}{ending}"
    if moment != "before":
        link.unlink(missing_ok=True)
        link.symlink_to(theirs)
    work()
    recording.stop()
    found = finished(run)
    assert [meta["state"] for meta, trace in found.values() if trace is not None] == ["complete"]
    assert theirs.read_text() == PRECIOUS


@pytest.mark.fault("a link is planted for a folder", "goes on", "what would be in it; the target is as it was")
@pytest.mark.parametrize("folder", ["global_step_000002", "journal", "control"])
def test_a_link_in_the_place_of_a_folder_is_refused(
    made: Any, tmp_path: Path, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made()
    run.rundir.path.mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (run.rundir.path / folder).symlink_to(elsewhere)
    uses: dict[str, Callable[[], Any]] = {
        "global_step_000002": lambda: recorder.begin(run, SUBJECT),
        "journal": lambda: span(run),  # a warning, as when the disk is full
        "control": lambda: layout.write_json(run.rundir.control / "x.json", {}),
    }
    if folder == "journal":
        uses[folder]()
    else:
        with pytest.raises(FileExistsError):
            uses[folder]()
    assert list(elsewhere.iterdir()) == []


@pytest.mark.fault("a link is planted for the run directory", "goes on", "autoprof's files; the target is as it was")
def test_a_run_directory_that_is_a_link_is_refused(made: Any, tmp_path: Path) -> None:
    run = made()
    (tmp_path / "elsewhere").mkdir()
    run.rundir.path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        recorder.begin(run, SUBJECT)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_the_parent_of_the_runs_may_be_a_link(made: Any, tmp_path: Path) -> None:
    (tmp_path / "big-disk").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "big-disk")
    layout.RunDir(tmp_path / "runs" / "one").make(tmp_path / "runs" / "one" / "journal")
    assert (tmp_path / "big-disk" / "one" / "journal").is_dir()


@pytest.mark.fault("a link or a pipe for the timeline", "goes on", "nothing")
def test_the_timeline_is_not_written_through_a_link_nor_waits_for_a_pipe(made: Any, theirs: Path) -> None:
    run = made()
    line = run.rundir.process_file("journal", ".jsonl")
    line.parent.mkdir(parents=True)
    line.symlink_to(theirs)
    os.mkfifo(line.with_suffix(".2.jsonl"))
    span(run)
    assert theirs.read_text() == PRECIOUS
    assert [found["kind"] for found in spans(line.with_suffix(".3.jsonl"))] == ["step"]


def test_what_is_removed_is_the_link_and_what_has_other_names_keeps_its_content(tmp_path: Path, theirs: Path) -> None:
    (tmp_path / "link").symlink_to(theirs)
    os.link(theirs, tmp_path / "hard")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "kept").touch()
    (tmp_path / "to-folder").symlink_to(tmp_path / "folder")
    for planted in ("link", "hard", "to-folder"):
        files.remove(str(tmp_path / planted))
        assert not os.path.lexists(tmp_path / planted)
    assert theirs.read_text() == PRECIOUS
    assert (tmp_path / "folder" / "kept").exists()


def test_a_trace_is_not_compressed_into_a_file_of_somebody_elses(tmp_path: Path, theirs: Path) -> None:
    (tmp_path / "x.gz.part").symlink_to(theirs)
    (tmp_path / "x.meta.json").symlink_to(theirs)
    raw = tmp_path / "raw.part"
    raw.write_text("{}")
    job = {"raw": str(raw), "trace": str(tmp_path / "x.gz"), "meta_path": str(tmp_path / "x.meta.json")}
    finisher.finish(job | {"meta": {"state": "complete", "reason": ""}, "max_bytes": 1000})
    assert theirs.read_text() == PRECIOUS
    assert json.loads((tmp_path / "x.meta.json").read_text())["state"] == "complete"
    assert not (tmp_path / "x.meta.json").is_symlink()
