"""Captures with the real torch.profiler, also with faults of disks, exports and tools."""

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

from autoprof.capture import finisher, recorder
from autoprof.capture.artifacts import Subject
from autoprof.capture.profilers import torch as torch_profiler
from autoprof.config.settings import Settings
from autoprof.rundir import file_names
from tests.support.captures import PROGRAM, SUBJECT, begun, captured, finished, job, work
from tests.support.helpers import TORCH, room_for, spans


def test_a_capture_leaves_a_trace_and_a_meta_file_that_agree(made: Any) -> None:
    run = made(contents=("cpu", "shapes", "flops", "profile-by-stage"))
    recording = recorder.begin(run, SUBJECT)
    before = time.time_ns()
    work()
    after = time.time_ns()
    recording.stop()
    ((name, (meta, trace)),) = finished(run).items()
    assert name.startswith("actor.update_actor.rank3.")
    assert (meta["state"], meta["reason"]) == ("complete", "")
    assert (meta["step"], meta["role"], meta["stage"], meta["rank"]) == (2, "actor", "update_actor", 3)
    assert meta["contents"] == ["cpu", "shapes", "flops"]
    assert meta["left_out"] == ["profile-by-stage"]
    assert meta["window"] == "AUTOPROF_STEPS=+2"
    file = run.rundir.step(2) / f"{name}{file_names.TRACE}"
    assert meta["bytes"] == file.stat().st_size
    assert meta["versions"]["torch"] == torch.__version__
    assert meta["clock"]["start"]["unix_ns"] <= before
    assert meta["clock"]["stop"]["unix_ns"] >= after
    events = [event for event in trace["traceEvents"] if event.get("cat") == "cpu_op"]
    assert any("Backward" in event["name"] for event in events)
    assert any("Input Dims" in event.get("args", {}) for event in events)
    assert list(run.rundir.parts()) == []


def test_the_timeline_has_the_start_the_stop_and_the_export(made: Any) -> None:
    run = made()
    captured(run)
    deadline = time.monotonic() + 60
    # The hand-over ends after the files are complete.
    while len(costs := [span for span in spans(run.rundir.path) if span["kind"] == "profiling"]) < 4:
        assert time.monotonic() < deadline, costs
        time.sleep(0.01)
        run.timeline.flush()
    assert [span["name"] for span in costs] == ["profiler start", "profiler stop", "export", "hand-over"]
    assert {(span["step"], span["role"], span["rank"]) for span in costs} == {(2, "actor", 3)}
    assert costs[1]["end_ns"] <= costs[2]["start_ns"] <= costs[2]["end_ns"]


def test_a_stage_that_runs_again_is_numbered(made: Any) -> None:
    run = made()
    for _ in range(3):
        recording = recorder.begin(run, SUBJECT)
        work()
        recording.stop()
    names = sorted(name.split(".rank3")[0] for name in finished(run))
    assert names == ["actor.update_actor", "actor.update_actor.2", "actor.update_actor.3"]


def test_a_thread_with_a_small_stack_is_not_captured_and_one_line_says_so(
    made: Any, mocker: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run = made()
    mocker.patch("autoprof.base.process.stack_bytes", return_value=248 << 10)
    assert [recorder.begin(run, SUBJECT), recorder.begin(run, SUBJECT)] == [None, None]
    assert recorder.current() is None
    line = "actor update_actor is not captured: the stack of its thread has 248 KiB and a profiler needs 256"
    assert caplog.messages == [f"{line}; see threading.stack_size"]
    mocker.patch("autoprof.base.process.stack_bytes", return_value=256 << 10)
    begun(run).stop()


def test_a_stage_inside_a_stage_is_part_of_its_capture(made: Any) -> None:
    run = made()
    outer = recorder.begin(run, SUBJECT)
    assert recorder.begin(run, Subject(step=2, role="actor", stage="inner", rank=3)) is None
    outer.stop()
    assert len(finished(run)) == 1


def test_a_trace_over_the_limit_is_cut_to_whole_events_and_says_so(made: Any) -> None:
    meta, trace = captured(made(max_trace_mb=0.05), lambda: [work() for _ in range(100)])
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
    whole = f'{{\n  "traceEvents": [\n{events}\n  ],\n  "baseTimeNanoseconds": 5\n}}'
    monkeypatch.setattr(finisher, "_PIECE", piece)
    finisher.finish(job(tmp_path, whole, max_bytes=limit))
    assert json.loads((tmp_path / "x.meta.json").read_text())["state"] == "truncated"
    content = gzip.decompress((tmp_path / "x.gz").read_bytes())
    trace = json.loads(content)
    assert trace["baseTimeNanoseconds"] == 5
    names = [event["name"] for event in trace["traceEvents"]]
    assert names == [str(number) for number in range(len(names))]
    assert limit - 50 < len(content) - 40 <= limit


def test_a_trace_that_can_not_be_cut_says_failed(tmp_path: Path) -> None:
    finisher.finish(job(tmp_path, "x" * 2000))
    assert json.loads((tmp_path / "x.meta.json").read_text())["state"] == "failed"
    assert [path.name for path in tmp_path.iterdir()] == ["x.meta.json"]


def test_autoprof_yields_to_a_profiler_that_was_first(made: Any, capsys: pytest.CaptureFixture[str]) -> None:
    recorder.watch_others()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as theirs:
        assert recorder.begin(made(), SUBJECT) is None
        work()
    assert any("Backward" in event.name for event in theirs.events())
    begun(made()).stop()


def test_autoprof_yields_to_a_profiler_that_comes_later(made: Any) -> None:
    recorder.watch_others()

    def users() -> None:
        work()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as theirs:
            work()
        assert any("Backward" in event.name for event in theirs.events())

    meta, trace = captured(made(), users)
    assert meta["state"] == "truncated"
    assert "another torch profiler was started" in meta["reason"]
    assert any("Backward" in event["name"] for event in trace["traceEvents"])


def test_a_profiler_in_another_thread_waits_for_the_captures_own_thread(made: Any, mocker: Any) -> None:
    recorder.watch_others()
    run = made()
    mocker.patch("autoprof.run.runtime.current", return_value=run)
    recording = recorder.begin(run, SUBJECT)
    theirs: list[int] = []

    def profile() -> None:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            work()
        theirs.append(len(profiler.events()))

    thread = threading.Thread(target=profile)
    thread.start()
    work()
    recording.stop()
    thread.join()
    ((meta, trace),) = finished(run).values()
    assert meta["state"] == "complete"
    assert trace["traceEvents"]
    assert theirs[0] > 0


def test_a_capture_whose_thread_does_not_come_back_is_given_up(made: Any, python: Any) -> None:
    # In a separate process, since torch treats the thread that began as recording from then on.
    code = """
import threading
recorder.watch_others()
recording = recorder.begin(run, subject)
def profile():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        torch.ones(2) + 1
    print(len(profiler.events()) > 0)
thread = threading.Thread(target=profile)
thread.start()
thread.join()
recording.stop()
"""
    variables = {"AUTOPROF": "1", "AUTOPROF_RUN_ID": "run", "AUTOPROF_STOP_TIMEOUT_S": "0.2"}
    assert python(PROGRAM + code, **variables).stdout.strip().endswith("True")


@pytest.mark.parametrize("action", ["SIG_IGN", "SIG_DFL"])
@pytest.mark.parametrize("limit", [1_000, 20_000, 2_000_000])
def test_a_full_disk_leaves_nothing_half_written(python: Any, tmp_path: Path, limit: int, action: str) -> None:
    # A limit of file sizes has the same effect on the raw trace as a full disk.
    limits = f"""
import resource, signal
signal.signal(signal.SIGXFSZ, signal.{action})
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
run = """
    code = """
recording = recorder.begin(run, subject)
x = torch.randn(20, 20, requires_grad=True)
for _ in range(30):
    (x @ x).sum().backward()
recording.stop()
print("goes on")
"""
    assert (
        python(PROGRAM.replace("run = ", limits) + code, AUTOPROF="1", AUTOPROF_RUN_ID="run").stdout.strip()
        == "goes on"
    )
    folder = tmp_path / "autoprof_runs" / "run" / "global_step_000002"
    deadline = time.monotonic() + 30
    while (not list(folder.glob("*.meta.json")) or list(folder.glob("*.part"))) and time.monotonic() < deadline:
        time.sleep(0.05)
    states = [json.loads(path.read_text())["state"] for path in folder.glob("*.meta.json")]
    assert states == ["complete" if limit == 2_000_000 else "failed"]
    assert len(list(folder.iterdir())) == (2 if limit == 2_000_000 else 1)


@pytest.mark.parametrize("ending", ["recording.stop()", "recording.fail('interrupted')"])
def test_a_stderr_over_the_size_limit_ends_no_process(python: Any, tmp_path: Path, ending: str) -> None:
    # torch writes lines to stderr when a recording starts, stops and is given up (2.13).
    code = f"""
import contextlib, os, resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
os.dup2(os.open("stderr", os.O_WRONLY | os.O_CREAT), 2)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
recording = recorder.begin(run, subject)
with contextlib.suppress(OSError):  # its meta file
    {ending}
print(recording is not None, signal.pthread_sigmask(signal.SIG_BLOCK, []), signal.sigpending())
"""
    assert python(PROGRAM + code, AUTOPROF="1", AUTOPROF_RUN_ID="run").stdout.strip() == "True set() set()"
    assert (tmp_path / "stderr").read_text() == ""


def test_a_disk_that_is_full_for_the_last_bytes_only_is_noticed(python: Any) -> None:
    # Kineto loses the last part of its buffer, up to 8 kB, without an error.
    code = """
import json, os, resource
from pathlib import Path
from autoprof.config.settings import Settings
from autoprof.capture.profilers.torch import TorchTool

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
    assert int(python(TORCH + code).stdout) > 5


def test_what_is_left_of_an_export_takes_no_room_though_it_is_open(made: Any, mocker: Any) -> None:
    run = made()
    opened = []

    def export(_: Any, path: str) -> None:
        opened.append(open(f"{path}.tmp", "wb"))  # noqa: SIM115
        opened[0].write(b"x" * 100_000)
        opened[0].flush()
        raise OSError("disk full")

    mocker.patch.object(torch_profiler.TorchTool, "export", export)
    recorder.begin(run, SUBJECT).stop()
    assert [meta["state"] for meta, _ in finished(run).values()] == ["failed"]
    with opened[0] as leftover:
        assert os.fstat(leftover.fileno()).st_size == 0


@pytest.mark.parametrize("part", ["mark", "stamp"])
def test_what_goes_wrong_after_the_start_leaves_no_profiler_on(made: Any, mocker: Any, part: str) -> None:
    mocker.patch.object(torch_profiler.TorchTool, part, side_effect=RuntimeError("no"))
    with pytest.raises(RuntimeError):
        recorder.begin(made(), SUBJECT)
    assert not torch.autograd._profiler_enabled()
    mocker.stopall()
    run = made()
    recording = recorder.begin(run, SUBJECT)
    work()
    recording.stop()
    assert sorted(meta["state"] for meta, _ in finished(run).values()) == ["complete", "failed"]


def test_without_another_process_the_trace_is_finished_here(made: Any, mocker: Any) -> None:
    run = made()
    mocker.patch("autoprof.base.interpreter._find", return_value="")
    meta, trace = captured(run)
    assert meta["state"] == "complete"
    assert trace["traceEvents"]


def test_a_trace_that_can_not_be_written_says_failed(tmp_path: Path) -> None:
    finisher.finish(job(tmp_path, base=str(tmp_path / "x"), trace=str(tmp_path / "no" / "folder.gz")))
    meta = json.loads((tmp_path / "x.meta.json").read_text())
    assert meta["state"] == "failed"
    assert [path.name for path in tmp_path.iterdir()] == ["x.meta.json"]


def test_a_disk_that_is_full_when_the_trace_is_compressed_costs_the_trace_only(tmp_path: Path) -> None:
    taken = tmp_path / "x.meta.json.part"
    taken.touch()
    given = job(tmp_path, os.urandom(20_000), max_bytes=50_000, taken=[str(taken)])
    with room_for(10_000):
        finisher.finish(given)
    meta = json.loads((tmp_path / "x.meta.json").read_text())
    assert meta["state"] == "failed"
    assert "File too large" in meta["reason"]
    assert [path.name for path in tmp_path.iterdir()] == ["x.meta.json"]


def test_a_disk_that_has_no_room_for_a_meta_file_either_keeps_the_name_of_what_was_lost(tmp_path: Path) -> None:
    taken = tmp_path / "x.meta.json.part"
    taken.touch()
    given = job(tmp_path, taken=[str(taken)])
    with room_for(0):
        finisher.finish(given)
    assert list(tmp_path.iterdir()) == [taken]


def test_names_are_tidy() -> None:
    subject = Subject(step=1, role="a/b", stage="x.y z", rank=0)
    assert subject.file_name(1).startswith("a-b.x-y-z.rank0.")
    engine = Subject(step=1, role="rollout", stage="rollout", rank=9, replica=1, part="dp0_tp1_rank1")
    assert engine.file_name(2).startswith("rollout.replica1.dp0_tp1_rank1.2.")


def test_a_recording_is_freed_when_it_is_written(tmp_path: Path) -> None:
    tool = torch_profiler.TorchTool()
    tool.start(Settings(contents=("cpu",)), tmp_path)
    result = weakref.ref(tool._profile.profiler)
    tool.stop()
    # A garbage collection during a later recording would free the result and crash.
    gc.disable()
    try:
        tool.export(str(tmp_path / "trace.json"))
        assert result() is None
    finally:
        gc.enable()


def test_a_recording_that_is_given_up_is_kept_from_the_garbage_collection() -> None:
    tool = torch_profiler.TorchTool()
    tool.start(Settings(contents=("cpu",)), Path())
    result = weakref.ref(tool._profile.profiler)
    tool.stop()
    del tool
    gc.collect()
    assert result() is not None
