"""Nsight Systems without a GPU: the processes that record with it, the calls of a window, and the reports."""

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
from autoprof.capture import finisher, profilers, recorder, whole_step
from autoprof.capture.artifacts import Subject
from autoprof.capture.profilers import nsys
from autoprof.capture.profilers.memory import MemoryTool
from autoprof.capture.profilers.nsys import NsysTool
from autoprof.capture.profilers.torch import TorchTool
from autoprof.config.settings import Settings
from autoprof.rundir import runs
from tests.support.captures import begun
from tests.support.nsys_runs import NSYS, SUBJECT, finished, record


@pytest.mark.needs("torch")
def test_a_process_under_nsys_uses_nothing_else(under_nsys: None) -> None:
    for asked in [(), ("torch",), ("npu", "torch"), ("nsys",), ("torch", "nsys"), ("nsys", "memory")]:
        assert isinstance(profilers.choose(Settings(tool=asked)), NsysTool), asked


def test_nobodys_session_is_disturbed(made: Any, cuda: list[str], under_nsys: None, mocker: Any) -> None:
    """The user runs this process under nsys, and `AUTOPROF_TOOL` does not name nsys."""
    warning = mocker.patch("autoprof.base.log.warning_once")
    assert recorder.begin(made(tool=("torch",)), SUBJECT) is None
    assert cuda == []
    assert "this process runs under nsys, which has CUPTI" in warning.call_args.args[0]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NSYS_PROFILING_SESSION_ID", "1"),
        (nsys.REPORT, "autoprof_%p"),
        ("LD_PRELOAD", "/opt/nvidia/nsight-systems/target-linux-x64/libToolsInjectionProxy64.so"),
        ("CUDA_INJECTION64_PATH", "/opt/nvidia/target-linux-x64/libToolsInjection64.so"),
    ],
)
def test_how_a_process_knows(name: str, value: str) -> None:
    assert nsys.runs_under_nsys({name: value})
    assert not nsys.runs_under_nsys({"LD_PRELOAD": "/usr/lib/libjemalloc.so"})


@pytest.mark.needs("torch")
def test_elsewhere_torch_records_and_it_is_said_once(mocker: Any) -> None:
    warning = mocker.patch("autoprof.base.log.warning_once")
    assert isinstance(profilers.choose(NSYS), TorchTool)
    assert "this process does not run under nsys; torch.profiler records instead" in warning.call_args.args[0]


@pytest.mark.needs("torch")
def test_the_memory_history_alone_stays_so(under_nsys: None, mocker: Any) -> None:
    mocker.patch.object(MemoryTool, "unavailable", return_value="")
    assert isinstance(profilers.choose(Settings(tool=("memory",))), MemoryTool)


def test_a_window_in_calls(made: Any, cuda: list[str], under_nsys: None) -> None:
    run = made(tool=("nsys",), contents=("cpu", "cuda", "shapes"))
    record(run)
    start, mark, begin, end, synchronize, stop = cuda
    assert [start, begin, end, synchronize, stop] == [
        "start",
        "range step 2 actor.update_actor",
        "end 7",
        "synchronize",
        "stop",
    ]
    stamp = json.loads(mark.removeprefix("mark "))["autoprof"]
    assert (stamp["global_step"], stamp["role"], stamp["stage"], stamp["rank"]) == (2, "actor", "update_actor", 3)


def test_ranges_in_the_window_of_a_whole_step(made: Any, cuda: list[str], under_nsys: None) -> None:
    run = made(tool=("nsys",), mode="continuous")
    for stage in ("compute_log_prob", "update_actor"):
        leave = whole_step.enter(run, Subject(step=2, role="actor", stage=stage, rank=3), run.settings)
        assert leave is not None
        leave("")
    whole_step.stop()
    ranges = [call for call in cuda if call.startswith("range")]
    assert ranges == ["range global_step 2", "range actor.compute_log_prob", "range actor.update_actor"]
    assert (cuda[0], cuda[-1], cuda.count("start")) == ("start", "stop", 1)


def test_ranges_inside_of_a_stage_have_their_own_names(made: Any, cuda: list[str], under_nsys: None) -> None:
    recording = begun(made(tool=("nsys",)))
    recording.mark("mini_batch 0")()
    recording.stop()
    assert [call for call in cuda if call.startswith("range")] == [
        "range step 2 actor.update_actor",
        "range mini_batch 0",
    ]


def test_the_report_of_the_users_own_command_stays_where_it_is(made: Any, cuda: list[str], under_nsys: None) -> None:
    run = made(tool=("nsys",))
    record(run)
    (meta,) = finished(run).values()
    assert (meta["tool"], meta["state"], meta["reason"]) == ("nsys", "complete", finisher.OWN_COMMAND)
    assert [path.name for path in run.rundir.step(2).iterdir() if "meta" not in path.name] == []


def test_without_cuda_a_meta_file_says_so(made: Any, under_nsys: None) -> None:
    run = made(tool=("nsys",))
    with pytest.raises(RuntimeError, match="CUDA is not initialised"):
        recorder.begin(run, SUBJECT)
    (meta,) = finished(run).values()
    assert meta["state"] == "failed"
    assert "CUDA is not initialised in this process" in meta["reason"]


def test_without_nvtx_windows_are_recorded_all_the_same(
    made: Any, cuda: list[str], under_nsys: None, mocker: Any
) -> None:
    for name in ("mark", "range_start"):
        mocker.patch(f"torch.cuda.nvtx.{name}", side_effect=RuntimeError("NVTX functions not installed"))
    record(made(tool=("nsys",)))
    assert cuda == ["start", "synchronize", "stop"]


def test_a_window_is_closed_though_the_device_failed(made: Any, cuda: list[str], under_nsys: None, mocker: Any) -> None:
    mocker.patch("torch.cuda.synchronize", side_effect=RuntimeError("an illegal memory access"))
    recording = recorder.begin(made(tool=("nsys",)), SUBJECT)
    with pytest.raises(RuntimeError):
        recording.stop()
    assert cuda[-1] == "stop"


def test_a_child_of_an_actor_under_nsys_records_nothing(made: Any, cuda: list[str], monkeypatch: Any) -> None:
    monkeypatch.setenv(nsys.REPORT, "autoprof_%p")
    assert recorder.begin(made(tool=("nsys",)), SUBJECT) is None
    assert cuda == []


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
