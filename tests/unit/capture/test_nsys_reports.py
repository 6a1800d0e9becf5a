"""Reports of Nsight Systems: their windows, the wait for them, and their final files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from autoprof.base import files
from autoprof.capture import finisher, recorder
from autoprof.capture.artifacts import Subject
from autoprof.rundir import runs
from tests.support.nsys_runs import SUBJECT, finished, record


def job(folder: Path, report: Path | str, number: int = 1, **more: Any) -> dict[str, Any]:
    """Return the finisher's job for a window of this process."""
    raw = folder / "x.nsys-rep.part"
    raw.write_text(json.dumps({"report": str(report), "number": number, "pid": os.getpid(), "patience_s": 0.3} | more))
    return {
        "raw": str(raw),
        "base": str(folder / "x"),
        "trace": str(folder / "x.pt.trace.json.gz"),
        "meta_path": str(folder / "x.meta.json"),
        "meta": {"state": "complete", "reason": "", "bytes": 0},
        "max_bytes": 1000,
        "python": sys.executable,
    }


def meta_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "x.meta.json").read_text())


def test_windows_are_paired_with_reports_by_their_order(made: Any, cuda: list[str], actor: Path) -> None:
    run = made(tool=("nsys",))
    stages = ["compute_log_prob", "update_actor", "update_weights"]
    for number, stage in enumerate(stages, 1):
        record(run, Subject(step=2, role="actor", stage=stage, rank=0))
        Path(f"{actor}.{number}.nsys-rep").write_text(stage)
    found = finished(run)
    assert sorted(found) == [f"actor.{stage}" for stage in stages]
    assert {(meta["state"], meta["reason"]) for meta in found.values()} == {("complete", "")}
    for stage in stages:
        (path,) = run.rundir.step(2).glob(f"actor.{stage}.rank0.*.nsys-rep")
        assert path.read_text() == stage
        assert found[f"actor.{stage}"]["bytes"] == len(stage)
    # Empty files keep the names in use.
    assert sorted(path.stat().st_size for path in actor.parent.iterdir()) == [0, 0, 0]
    (step,) = runs.read(run.rundir.path).steps
    assert [(capture.state, capture.bytes) for capture in step.captures] == [
        ("complete", len(stage)) for stage in stages
    ]


def test_a_window_that_did_not_open_has_no_number(made: Any, cuda: list[str], actor: Path, mocker: Any) -> None:
    run = made(tool=("nsys",))
    start = mocker.patch("torch.cuda.profiler.start", side_effect=RuntimeError("no"))
    with pytest.raises(RuntimeError):
        recorder.begin(run, SUBJECT)
    start.side_effect = None
    record(run, Subject(step=2, role="actor", stage="update_weights", rank=3))
    Path(f"{actor}.1.nsys-rep").write_text("the only one")
    states = {name: meta["state"] for name, meta in finished(run).items()}
    assert states == {"actor.update_actor": "failed", "actor.update_weights": "complete"}


def test_a_report_without_number_is_the_first_windows(tmp_path: Path) -> None:
    (tmp_path / "r.nsys-rep").write_text("x")
    finisher.finish(job(tmp_path, tmp_path / "r"))
    assert meta_of(tmp_path)["state"] == "complete"
    finisher.finish(job(tmp_path, tmp_path / "r", number=2, pid=2**30))
    assert meta_of(tmp_path)["state"] == "failed"


def test_a_report_that_is_being_written_is_waited_for(tmp_path: Path) -> None:
    report, unfinished = tmp_path / "r.1.nsys-rep", tmp_path / "r.1.qdstrm"
    unfinished.write_text("")
    report.write_text("a")
    given = job(tmp_path, tmp_path / "r")
    os.utime(given["raw"], (0, 0))

    def write() -> None:
        for _ in range(5):
            time.sleep(0.05)
            with report.open("a") as file:
                file.write("b")
        unfinished.unlink()

    thread = threading.Thread(target=write)
    thread.start()
    finisher.finish(given)
    thread.join()
    assert (tmp_path / "x.nsys-rep").read_text() == "abbbbb"
    assert meta_of(tmp_path)["bytes"] == 6
    assert not Path(given["raw"]).exists()


def test_who_waits_is_seen_to_be_alive(tmp_path: Path) -> None:
    given = job(tmp_path, tmp_path / "r", pid=2**30)
    os.utime(given["raw"], (0, 0))
    times: list[float] = []

    def look() -> None:
        while Path(given["raw"]).exists():
            try:
                times.append(Path(given["raw"]).stat().st_mtime)
            except FileNotFoundError:
                return
            time.sleep(0.02)

    thread = threading.Thread(target=look)
    thread.start()
    finisher.finish(given)
    thread.join()
    assert times[-1] > time.time() - 60


def test_there_is_a_part_until_the_meta_file_is_there(tmp_path: Path, mocker: Any) -> None:
    """Other processes wait for a capture while its .part file exists."""
    (tmp_path / "r.nsys-rep").write_text("x")
    seen: list[list[str]] = []
    write = files.write

    def look(path: str, content: bytes) -> None:
        seen.append([each.name for each in tmp_path.glob("*.part")])
        write(path, content)

    mocker.patch.object(files, "write", look)
    finisher.finish(job(tmp_path, tmp_path / "r") | {"trace": str(tmp_path / "x.nsys-rep")})
    assert seen == [["x.nsys-rep.named.part"]]
    assert not list(tmp_path.glob("*.part"))


def test_a_report_that_never_comes(tmp_path: Path) -> None:
    finisher.finish(job(tmp_path, tmp_path / "r", pid=2**30))
    meta = meta_of(tmp_path)
    assert meta["state"] == "failed"
    assert f"nsys wrote no report {tmp_path}/r.1.nsys-rep within" in meta["reason"]
    assert [path.name for path in tmp_path.iterdir()] == ["x.meta.json"]


def test_a_report_that_comes_with_the_end_of_the_process(tmp_path: Path, mocker: Any) -> None:
    """Other processes do not wait for the report meanwhile."""
    mocker.patch.object(finisher, "_LONG_PAUSE_S", 0.05)
    with subprocess.Popen(["sleep", "60"]) as process:
        given = job(tmp_path, tmp_path / "r", pid=process.pid, patience_s=0.2)
        thread = threading.Thread(target=finisher.finish, args=(given,))
        thread.start()
        time.sleep(0.5)
        os.utime(given["raw"], (0, 0))
        time.sleep(0.3)
        assert os.stat(given["raw"]).st_mtime == 0
        (tmp_path / "r.1.nsys-rep").write_text("late")
        process.kill()
    thread.join()
    assert (tmp_path / "x.nsys-rep").read_text() == "late"
    assert meta_of(tmp_path)["state"] == "complete"


def test_without_another_process_the_wait_is_short(tmp_path: Path) -> None:
    finisher.finish(job(tmp_path, tmp_path / "r") | {"python": ""})
    assert "within 0.3 s after the window" in meta_of(tmp_path)["reason"]


def test_a_report_on_another_file_system(tmp_path: Path, mocker: Any) -> None:
    report = tmp_path / "r.1.nsys-rep"
    report.write_text("across")
    mocker.patch("os.rename", side_effect=OSError(18, "Invalid cross-device link"))
    finisher.finish(job(tmp_path, tmp_path / "r"))
    assert (tmp_path / "x.nsys-rep").read_text() == "across"
    assert report.stat().st_size == 0


def test_it_is_taken_by_a_process_without_site(made: Any, cuda: list[str], actor: Path) -> None:
    """All steps, with a real finisher process, which outlives this one."""
    run = made(tool=("nsys",))
    record(run)
    Path(f"{actor}.1.nsys-rep").write_text("report")
    (meta,) = finished(run).values()
    assert (meta["state"], meta["bytes"]) == ("complete", 6)
