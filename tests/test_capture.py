"""Captures with the real torch.profiler."""

from __future__ import annotations

import gc
import gzip
import json
import os
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import room_for

from autoprof import _finish, capture, ending, rundir
from autoprof.naming import Subject
from autoprof.runtime import Runtime
from autoprof.settings import Settings
from autoprof.tools import torch as torch_tool

SUBJECT = Subject(step=2, role="actor", stage="update_actor", rank=3)


def work() -> None:
    x = torch.randn(20, 20, requires_grad=True)
    (x @ x).sum().backward()


def finished(run: Runtime) -> dict[str, tuple[dict[str, Any], dict[str, Any] | None]]:
    """Meta and trace of each capture, when all files are complete."""
    deadline = time.monotonic() + 30
    while list(run.rundir.parts()) and time.monotonic() < deadline:
        time.sleep(0.02)
    ending.wait_for_files(run)
    found = {}
    for path in run.rundir.path.rglob("*.meta.json"):
        trace = Path(str(path).replace(rundir.META, rundir.TRACE))
        content = json.loads(gzip.decompress(trace.read_bytes())) if trace.exists() else None
        found[path.name.removesuffix(rundir.META)] = (json.loads(path.read_text()), content)
    return found


def test_a_capture_leaves_a_trace_and_a_meta_file_that_agree(made: Any) -> None:
    run = made(contents=("cpu", "shapes", "flops", "profile-by-stage"))
    recording = capture.begin(run, SUBJECT)
    before = time.time_ns()
    work()
    after = time.time_ns()
    capture.end(recording)
    ((name, (meta, trace)),) = finished(run).items()
    assert name.startswith("actor.update_actor.rank3.")
    assert (meta["state"], meta["reason"]) == ("complete", "")
    assert (meta["step"], meta["role"], meta["stage"], meta["rank"]) == (2, "actor", "update_actor", 3)
    assert meta["contents"] == ["cpu", "shapes", "flops"]
    assert meta["left_out"] == ["profile-by-stage"]
    assert meta["window"] == "AUTOPROF_STEPS=+2"
    file = run.rundir.step(2) / f"{name}{rundir.TRACE}"
    assert meta["bytes"] == file.stat().st_size
    assert meta["versions"]["torch"] == torch.__version__
    assert meta["clock"]["start"]["unix_ns"] <= before
    assert meta["clock"]["stop"]["unix_ns"] >= after
    events = [event for event in trace["traceEvents"] if event.get("cat") == "cpu_op"]
    assert any("Backward" in event["name"] for event in events)
    assert any("Input Dims" in event.get("args", {}) for event in events)
    assert list(run.rundir.parts()) == []


def test_a_stage_that_runs_again_is_numbered(made: Any) -> None:
    run = made()
    for _ in range(3):
        recording = capture.begin(run, SUBJECT)
        work()
        capture.end(recording)
    names = sorted(name.split(".rank3")[0] for name in finished(run))
    assert names == ["actor.update_actor", "actor.update_actor.2", "actor.update_actor.3"]


def test_a_stage_inside_a_stage_is_part_of_its_capture(made: Any) -> None:
    run = made()
    outer = capture.begin(run, SUBJECT)
    assert capture.begin(run, Subject(step=2, role="actor", stage="inner", rank=3)) is None
    capture.end(outer)
    assert len(finished(run)) == 1


def test_a_stage_that_raises_is_truncated(made: Any) -> None:
    run = made()
    recording = capture.begin(run, SUBJECT)
    work()
    capture.end(recording, ValueError("x"))
    ((meta, trace),) = finished(run).values()
    assert (meta["state"], meta["reason"]) == ("truncated", "the stage raised ValueError")
    assert trace["traceEvents"]


def test_a_trace_over_the_limit_is_cut_to_whole_events_and_says_so(made: Any) -> None:
    run = made(max_trace_mb=0.05)
    recording = capture.begin(run, SUBJECT)
    for _ in range(100):
        work()
    capture.end(recording)
    ((meta, trace),) = finished(run).values()
    assert meta["state"] == "truncated"
    assert meta["reason"] == "the trace was over 50000 bytes"
    assert 10 < len(trace["traceEvents"]) < 1000
    assert trace["baseTimeNanoseconds"] > 0
    assert len(json.dumps(trace)) < 60000


@pytest.mark.parametrize("piece", [7, 64, 1 << 20])
@pytest.mark.parametrize("limit", [120, 200, 10_000])
def test_a_cut_ends_with_a_whole_event_wherever_the_pieces_end(
    piece: int, limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = ",\n".join(f'  {{\n    "ph": "X", "name": "{number}"\n  }}' for number in range(400))
    raw = tmp_path / "raw.part"
    raw.write_text(f'{{\n  "traceEvents": [\n{events}\n  ],\n  "baseTimeNanoseconds": 5\n}}')
    monkeypatch.setattr(_finish, "_PIECE", piece)
    job = {"raw": str(raw), "trace": str(tmp_path / "x.gz"), "meta_path": str(tmp_path / "x.meta.json")}
    _finish.finish(job | {"meta": {"state": "complete", "reason": ""}, "max_bytes": limit})
    assert json.loads((tmp_path / "x.meta.json").read_text())["state"] == "truncated"
    content = gzip.decompress((tmp_path / "x.gz").read_bytes())
    trace = json.loads(content)
    assert trace["baseTimeNanoseconds"] == 5
    names = [event["name"] for event in trace["traceEvents"]]
    assert names == [str(number) for number in range(len(names))]
    assert limit - 50 < len(content) - 40 <= limit


def test_a_trace_that_can_not_be_cut_says_failed(tmp_path: Path) -> None:
    raw = tmp_path / "raw.part"
    raw.write_text("x" * 2000)
    job = {"raw": str(raw), "trace": str(tmp_path / "x.gz"), "meta_path": str(tmp_path / "x.meta.json")}
    _finish.finish(job | {"meta": {"state": "complete", "reason": ""}, "max_bytes": 1000})
    assert json.loads((tmp_path / "x.meta.json").read_text())["state"] == "failed"
    assert [path.name for path in tmp_path.iterdir()] == ["x.meta.json"]


def test_autoprof_yields_to_a_profiler_that_was_first(made: Any, capsys: pytest.CaptureFixture[str]) -> None:
    capture.watch_others()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as theirs:
        assert capture.begin(made(), SUBJECT) is None
        work()
    assert any("Backward" in event.name for event in theirs.events())
    recording = capture.begin(made(), SUBJECT)
    assert recording is not None
    capture.end(recording)


def test_autoprof_yields_to_a_profiler_that_comes_later(made: Any) -> None:
    capture.watch_others()
    run = made()
    recording = capture.begin(run, SUBJECT)
    work()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as theirs:
        work()
    assert any("Backward" in event.name for event in theirs.events())
    capture.end(recording)
    ((meta, trace),) = finished(run).values()
    assert meta["state"] == "truncated"
    assert "another torch.profiler was started" in meta["reason"]
    assert any("Backward" in event["name"] for event in trace["traceEvents"])


def test_a_profiler_in_another_thread_waits_for_the_captures_own_thread(made: Any, mocker: Any) -> None:
    capture.watch_others()
    run = made()
    mocker.patch("autoprof.runtime.current", return_value=run)
    recording = capture.begin(run, SUBJECT)
    theirs: list[int] = []

    def profile() -> None:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            work()
        theirs.append(len(profiler.events()))

    thread = threading.Thread(target=profile)
    thread.start()
    work()
    capture.end(recording)
    thread.join()
    ((meta, trace),) = finished(run).values()
    assert meta["state"] == "complete"
    assert trace["traceEvents"]
    assert theirs[0] > 0


def test_a_capture_whose_thread_does_not_come_back_is_given_up(made: Any, python: Any) -> None:
    # In a process of its own: torch takes the thread that began for recording from then on.
    code = """
import threading, torch
from autoprof import capture, runtime
from autoprof.naming import Subject
run = runtime.start()
capture.watch_others()
recording = capture.begin(run, Subject(step=2, role="actor", stage="update_actor", rank=3))
def profile():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        torch.ones(2) + 1
    print(len(profiler.events()) > 0)
thread = threading.Thread(target=profile)
thread.start()
thread.join()
capture.end(recording)
"""
    variables = {"AUTOPROF": "1", "AUTOPROF_RUN_ID": "run", "AUTOPROF_STOP_TIMEOUT_S": "0.2"}
    assert python(code, **variables).stdout.strip().endswith("True")


def test_a_stage_that_ends_in_another_thread_is_given_up(made: Any, python: Any, tmp_path: Path) -> None:
    code = """
import threading, torch
from autoprof import capture, runtime
from autoprof.naming import Subject
run = runtime.start()
recording = capture.begin(run, Subject(step=2, role="actor", stage="update_actor", rank=3))
thread = threading.Thread(target=capture.end, args=(recording,))
thread.start()
thread.join()
"""
    python(code, AUTOPROF="1", AUTOPROF_RUN_ID="run")
    (path,) = (tmp_path / "autoprof_runs" / "run" / "global_step_000002").iterdir()
    meta = json.loads(path.read_text())
    assert meta["state"] == "failed"
    assert "another thread" in meta["reason"]


def test_an_export_that_fails_leaves_a_meta_file_with_the_reason(made: Any, mocker: Any) -> None:
    run = made()
    mocker.patch.object(torch_tool.TorchTool, "export", side_effect=OSError("disk full"))
    recording = capture.begin(run, SUBJECT)
    capture.end(recording)
    ((meta, trace),) = finished(run).values()
    assert trace is None
    assert meta["state"] == "failed"
    assert "disk full" in meta["reason"]


@pytest.mark.parametrize("limit", [1_000, 20_000, 2_000_000])
def test_a_full_disk_leaves_nothing_half_written(python: Any, tmp_path: Path, limit: int) -> None:
    # No file can grow over the limit, which is what a full disk does to the raw trace.
    code = f"""
import resource, torch
from autoprof import capture, runtime
from autoprof.naming import Subject
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
run = runtime.start()
recording = capture.begin(run, Subject(step=2, role="actor", stage="update_actor", rank=3))
x = torch.randn(20, 20, requires_grad=True)
for _ in range(30):
    (x @ x).sum().backward()
capture.end(recording)
print("goes on")
"""
    assert python(code, AUTOPROF="1", AUTOPROF_RUN_ID="run").stdout.strip() == "goes on"
    folder = tmp_path / "autoprof_runs" / "run" / "global_step_000002"
    deadline = time.monotonic() + 30
    while (not list(folder.glob("*.meta.json")) or list(folder.glob("*.part"))) and time.monotonic() < deadline:
        time.sleep(0.05)
    states = [json.loads(path.read_text())["state"] for path in folder.glob("*.meta.json")]
    assert states == ["complete" if limit == 2_000_000 else "failed"]
    assert len(list(folder.iterdir())) == (2 if limit == 2_000_000 else 1)


def test_a_disk_that_is_full_for_the_last_bytes_only_is_noticed(python: Any) -> None:
    # What Kineto has in its buffer at the end, up to 8 kB, it loses without a word.
    code = """
import json, os, resource
from pathlib import Path
from autoprof.settings import Settings
from autoprof.tools.torch import TorchTool
import torch

def export(path):
    tool = TorchTool()
    tool.start(Settings(contents=("cpu",)), Path(path))
    for _ in range(100):
        torch.ones(3) + 1
    tool.stop()
    tool.export(path)

export("whole")
size = os.path.getsize("whole")
refused = 0
for short in range(500, 16_000, 1_500):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size - short, resource.RLIM_INFINITY))
    try:
        export("cut")
    except OSError:
        refused += 1
    else:
        json.load(open("cut"))
print(refused)
"""
    assert int(python(code).stdout) > 5


def test_what_is_left_of_an_export_takes_no_room_though_it_is_open(made: Any, mocker: Any) -> None:
    run = made()
    opened = []

    def export(_: Any, path: str) -> None:
        opened.append(open(f"{path}.tmp", "wb"))  # noqa: SIM115
        opened[0].write(b"x" * 100_000)
        opened[0].flush()
        raise OSError("disk full")

    mocker.patch.object(torch_tool.TorchTool, "export", export)
    capture.end(capture.begin(run, SUBJECT))
    assert [meta["state"] for meta, _ in finished(run).values()] == ["failed"]
    with opened[0] as leftover:
        assert os.fstat(leftover.fileno()).st_size == 0


def test_a_tool_that_does_not_start_leaves_the_process_free(made: Any, mocker: Any) -> None:
    mocker.patch.object(torch_tool.TorchTool, "start", side_effect=RuntimeError("no"))
    with pytest.raises(RuntimeError):
        capture.begin(made(), SUBJECT)
    mocker.stopall()
    recording = capture.begin(made(), SUBJECT)
    assert recording is not None
    capture.end(recording)


@pytest.mark.parametrize("part", ["mark", "stamp"])
def test_what_goes_wrong_after_the_start_leaves_no_profiler_on(made: Any, mocker: Any, part: str) -> None:
    mocker.patch.object(torch_tool.TorchTool, part, side_effect=RuntimeError("no"))
    with pytest.raises(RuntimeError):
        capture.begin(made(), SUBJECT)
    assert not torch.autograd._profiler_enabled()
    mocker.stopall()
    run = made()
    recording = capture.begin(run, SUBJECT)
    work()
    capture.end(recording)
    assert sorted(meta["state"] for meta, _ in finished(run).values()) == ["complete", "failed"]


def test_without_another_process_the_trace_is_finished_here(made: Any, mocker: Any) -> None:
    run = made()
    mocker.patch("autoprof.interpreter._find", return_value="")
    recording = capture.begin(run, SUBJECT)
    work()
    capture.end(recording)
    ((meta, trace),) = finished(run).values()
    assert meta["state"] == "complete"
    assert trace["traceEvents"]


def test_a_trace_that_can_not_be_written_says_failed(tmp_path: Path) -> None:
    raw = tmp_path / "raw.part"
    raw.write_text("{}")
    _finish.finish(
        {
            "raw": str(raw),
            "base": str(tmp_path / "x"),
            "trace": str(tmp_path / "no" / "folder.gz"),
            "meta_path": str(tmp_path / "x.meta.json"),
            "meta": {"state": "complete", "reason": ""},
            "max_bytes": 1000,
        }
    )
    meta = json.loads((tmp_path / "x.meta.json").read_text())
    assert meta["state"] == "failed"
    assert [path.name for path in tmp_path.iterdir()] == ["x.meta.json"]


def test_a_disk_that_is_full_when_the_trace_is_compressed_costs_the_trace_only(tmp_path: Path) -> None:
    raw = tmp_path / "raw.part"
    raw.write_bytes(os.urandom(20_000))
    taken = tmp_path / "x.meta.json.part"
    taken.touch()
    job = {"raw": str(raw), "trace": str(tmp_path / "x.gz"), "meta_path": str(tmp_path / "x.meta.json")}
    with room_for(10_000):
        _finish.finish(job | {"meta": {"state": "complete", "reason": ""}, "max_bytes": 50_000, "taken": [str(taken)]})
    meta = json.loads((tmp_path / "x.meta.json").read_text())
    assert meta["state"] == "failed"
    assert "File too large" in meta["reason"]
    assert [path.name for path in tmp_path.iterdir()] == ["x.meta.json"]


def test_a_disk_that_has_no_room_for_a_meta_file_either_keeps_the_name_of_what_was_lost(tmp_path: Path) -> None:
    raw = tmp_path / "raw.part"
    raw.write_text("{}")
    taken = tmp_path / "x.meta.json.part"
    taken.touch()
    job = {"raw": str(raw), "trace": str(tmp_path / "x.gz"), "meta_path": str(tmp_path / "x.meta.json")}
    with room_for(0):
        _finish.finish(job | {"meta": {"state": "complete", "reason": ""}, "max_bytes": 1000, "taken": [str(taken)]})
    assert list(tmp_path.iterdir()) == [taken]


def test_names_are_tidy() -> None:
    subject = Subject(step=1, role="a/b", stage="x.y z", rank=0)
    assert subject.file_name(1).startswith("a-b.x-y-z.rank0.")
    engine = Subject(step=1, role="rollout", stage="rollout", rank=9, replica=1, part="dp0_tp1_rank1")
    assert engine.file_name(2).startswith("rollout.replica1.dp0_tp1_rank1.2.")


def test_a_recording_is_freed_when_it_is_written(tmp_path: Path) -> None:
    tool = torch_tool.TorchTool()
    tool.start(Settings(contents=("cpu",)), tmp_path)
    result = weakref.ref(tool._profile.profiler)
    tool.stop()
    # A collection during a later recording would free what is in a cycle, and crash.
    gc.disable()
    try:
        tool.export(str(tmp_path / "trace.json"))
        assert result() is None
    finally:
        gc.enable()


def test_a_recording_that_is_given_up_is_kept_from_the_garbage_collection() -> None:
    tool = torch_tool.TorchTool()
    tool.start(Settings(contents=("cpu",)), Path())
    result = weakref.ref(tool._profile.profiler)
    tool.stop()
    del tool
    gc.collect()
    assert result() is not None
