"""Files that are written after a stop, while the next capture is recorded, and the names in them."""

from __future__ import annotations

import fcntl
import gzip
import importlib
import io
import json
import os
import py_compile
import re
import sys
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from autoprof.behaviours import steps
from autoprof.behaviours.ray import Shutdown
from autoprof.capture import finisher, recorder, writer
from autoprof.capture.profilers import foreign
from autoprof.capture.profilers import torch as torch_profiler
from autoprof.hooks.behaviour import Call
from autoprof.run import end
from autoprof.rundir import file_names
from tests.support.captures import SUBJECT, begun, captured, finished, job, work
from tests.support.helpers import TORCH


@pytest.fixture
def held(mocker: Any) -> threading.Event:
    """Exports wait for this."""
    event = threading.Event()
    export = torch_profiler.TorchTool.export

    def wait_and_export(tool: Any, path: str) -> None:
        assert event.wait(20)
        export(tool, path)

    mocker.patch.object(torch_profiler.TorchTool, "export", wait_and_export)
    return event


def record(run: Any, size: int = 100) -> None:
    recording = begun(run)
    for _ in range(size):
        torch.ones(3) + 1
    recording.stop()


def test_the_thread_that_recorded_goes_on(made: Any, held: threading.Event) -> None:
    run = made()
    record(run)
    assert len(list(run.rundir.parts())) == 1
    held.set()
    ((meta, _),) = finished(run).values()
    assert meta["state"] == "complete"


def test_the_next_recording_begins_when_the_one_before_is_written_and_freed(made: Any, held: threading.Event) -> None:
    run = made()
    record(run)
    first = torch_profiler._unwritten[-1]
    threading.Timer(0.3, held.set).start()
    recording = recorder.begin(run, SUBJECT)
    assert held.is_set()
    assert first.profiler is None
    recording.stop()
    assert [meta["state"] for meta, _ in finished(run).values()] == ["complete"] * 2


def test_a_recording_that_would_wait_too_long_for_the_one_before_does_not_begin(
    made: Any, held: threading.Event
) -> None:
    run = made(stop_timeout_s=0.2)
    record(run)
    with pytest.raises(RuntimeError, match="still writing its previous trace"):
        recorder.begin(run, SUBJECT)
    held.set()
    assert sorted(meta["state"] for meta, _ in finished(made()).values()) == ["complete", "failed"]


def test_somebody_elses_profiler_begins_when_ours_is_written(made: Any, held: threading.Event) -> None:
    run = made()
    recorder.watch_others()
    record(run)
    threading.Timer(0.3, held.set).start()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert held.is_set()
        assert foreign.busy()
    finished(run)


def test_what_can_not_even_be_said_in_a_meta_file_is_the_problem_of_its_placement(made: Any, mocker: Any) -> None:
    run = made()
    recording = recorder.begin(run, SUBJECT)
    mocker.patch.object(torch_profiler.TorchTool, "export", side_effect=OSError("disk full"))
    mocker.patch("autoprof.rundir.layout.write_json", side_effect=OSError("disk full"))
    recording.stop()
    recording.wait()
    assert recording.artifacts.problem == "OSError: disk full"
    # The lock file stays, so that `autoprof ls` lists the lost capture.
    assert [path.name.endswith(file_names.TAKEN) for path in run.rundir.path.rglob("*.part")] == [True]


def test_without_a_thread_it_is_written_here(mocker: Any) -> None:
    mocker.patch("_thread.start_new_thread", side_effect=RuntimeError("can't start new thread"))
    done: list[int] = []
    writer.later(writer.Job(lambda: done.append(threading.get_ident()), 1.0))
    assert done == [threading.get_ident()]


@pytest.mark.parametrize(("captures", "size"), [(10, 100), (30, 200)])
def test_many_captures_one_after_the_other(
    python: Any, captures: int, size: int, request: pytest.FixtureRequest
) -> None:
    if captures > 10:
        request.getfixturevalue("thorough")
    # In a separate process, since torch crashes if a recording is freed too late.
    code = f"""
import os
os.environ["AUTOPROF_RUN_ID"] = "made"
from autoprof.capture import recorder
from autoprof.run import runtime
from autoprof.capture.artifacts import Subject
run = runtime.start()
for number in range({captures}):
    recording = recorder.begin(run, Subject(step=number, role="actor", stage="update_actor", rank=0))
    x = torch.ones(30, 30, requires_grad=True)
    for _ in range({size}):
        (x @ x).sum().backward()
    recording.stop()
"""
    python(TORCH + code, AUTOPROF="1")


def test_what_another_process_finishes_is_left_to_it(made: Any, tmp_path: Path) -> None:
    given, trace = job(tmp_path), tmp_path / "x.gz"
    with open(given["raw"]) as theirs:
        fcntl.flock(theirs, fcntl.LOCK_EX)
        finisher.finish(given)
    assert not trace.exists()
    finisher.finish(given)
    assert trace.exists()
    before = trace.stat()
    finisher.finish(given)
    assert trace.stat() == before


@pytest.mark.needs("zlib_ng")
@pytest.mark.parametrize("installed", [True, False])
def test_zlib_ng_compresses_if_it_is_installed(
    installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mocker: Any
) -> None:
    monkeypatch.setattr(sys, "path", [path for path in sys.path if "site-packages" not in path])
    for name in ("zlib_ng", "zlib_ng.gzip_ng"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    content, packages = b'{\n  "name": "a"\n}' * 1000, writer._DEPENDENCIES if installed else str(tmp_path)
    given = job(tmp_path, content, max_bytes=10**6, packages=packages)
    copy = mocker.spy(finisher, "copy")
    finisher.finish(given)
    assert type(copy.call_args.args[1]).__module__ == ("zlib_ng.gzip_ng" if installed else "gzip")
    assert gzip.decompress((tmp_path / "x.gz").read_bytes()) == content


def test_the_end_of_ray_waits_for_what_workers_are_writing(joined: Any, mocker: Any) -> None:
    run = joined()
    part = run.rundir.step(1) / "actor.update_actor.rank0.pt.trace.json.part"
    part.parent.mkdir(parents=True)
    part.touch()
    # An NPU's folder is another process's by now.
    (part.parent / "x_ascend_pt.part").mkdir()
    mocker.patch.dict("sys.modules", ray=mocker.Mock(is_initialized=lambda: True))
    threading.Timer(0.5, part.unlink).start()
    around = Shutdown().around(Call("ray/shutdown", lambda: None, (), {}))
    next(around)
    assert not part.exists()


def test_the_end_of_all_steps_waits_under_ray_only(joined: Any, mocker: Any) -> None:
    run = joined(stop_timeout_s=0.3)
    part = run.rundir.step(1) / "actor.update_actor.rank0.pt.trace.json.part"
    part.parent.mkdir(parents=True)
    part.touch()
    waited = mocker.spy(end, "wait_for_files")
    for there in (False, True):
        mocker.patch.dict("sys.modules", ray=mocker.Mock(is_initialized=lambda there=there: there))
        around = steps.Loop().around(Call("verl/fit", lambda: None, (), {}, run))
        next(around)
        around.send(mocker.Mock(error=None)).block()
        assert waited.call_count == int(there)


def test_a_trace_that_is_still_written_beside_its_place_is_waited_for(made: Any, mocker: Any) -> None:
    run = made(stop_timeout_s=0.5)
    part = run.rundir.step(1) / "actor.update_actor.rank0.pt.trace.json.part"
    part.parent.mkdir(parents=True)
    part.touch()
    os.utime(part, (1, 1))
    sleep, pause = mocker.spy(end.time, "sleep"), mocker.call(end._PAUSE_S)
    end.wait_for_files(run)
    assert pause not in sleep.mock_calls
    part.with_name(f"{part.name}.tmp").touch()
    end.wait_for_files(run)
    assert pause in sleep.mock_calls


BEGIN = "import os, time\nfrom autoprof.capture import writer\n"


def test_a_process_that_ends_while_it_writes_waits_for_it(python: Any, tmp_path: Path) -> None:
    python(BEGIN + 'writer.later(writer.Job(lambda: (time.sleep(0.3), open("there", "w")), 1.0))')
    assert (tmp_path / "there").exists()


def test_a_process_that_ends_waits_no_longer_than_a_stop_may_take(python: Any) -> None:
    python(BEGIN + "writer.later(writer.Job(lambda: time.sleep(600), 0.2))")


def test_a_forked_child_waits_for_none_of_its_parents_threads(python: Any, tmp_path: Path) -> None:
    code = """
for _ in range(2):
    writer.later(writer.Job(lambda: time.sleep(3), 30.0))
child = os.fork()
if not child:
    begun = time.monotonic()
    writer.later(writer.Job(lambda: open("there", "w").close(), 30.0))
    writer.wait(1.0)
    os._exit(int(not writer.wait(1.0) or time.monotonic() - begun > 2))
assert os.waitpid(child, 0)[1] == 0
"""
    python(BEGIN + code)
    assert (tmp_path / "there").exists()


def written(content: bytes, piece: int = 1 << 20) -> bytes:
    file = io.BytesIO()
    with mock.patch.object(finisher, "_PIECE", piece):
        finisher.copy(io.BytesIO(content), file, len(content))
    return file.getvalue()


def kineto(name: bytes) -> bytes:
    """Return a trace as Kineto writes it, with an unescaped name."""
    event = b'  {\n    "ph": "X",\n    "name": "%b",\n    "args": {\n      "name": "thread 1 (%b)"\n    }\n  }' % (
        name,
        name,
    )
    stamp = b'      "autoprof": {"name": "a\\\\", "host": "b, \\"name\\": \\"c"},\n'
    return b'{\n%b  "traceEvents": [\n%b,\n%b\n  ],\n  "traceName": "x"\n}' % (stamp, event, event)


def test_names_with_quotes_are_in_the_trace_as_they_are(made: Any) -> None:
    names = ['say "hi"', '", "cat": "x', "layer(0): attn", "plain"]

    def named() -> None:
        for name in names:
            with torch.profiler.record_function(name):
                work()

    meta, trace = captured(made(), named)
    assert meta["state"] == "complete"
    assert {event["name"] for event in trace["traceEvents"]} >= set(names)


def test_modules_imported_in_a_stage_are_called_so(made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps a pointer to the name of the code, and writes the bytes that are there later."""
    monkeypatch.syspath_prepend(str(tmp_path))
    modules = [f"imported_in_a_stage_{number}" for number in range(20)]
    for module in modules:
        (tmp_path / f"{module}.py").write_text("def function(): ...\n")
        py_compile.compile(str(tmp_path / f"{module}.py"))  # what is read from there is freed
    run = made(contents=("cpu", "stack"))
    recording = recorder.begin(run, SUBJECT)
    for module in modules:
        importlib.import_module(module)
    taken = [f'"{number}",' * 3 for number in range(50_000)]
    recording.stop()
    del taken
    ((_, trace),) = finished(run).values()
    for module in modules:
        del sys.modules[module]
    found = [event["name"] for event in trace["traceEvents"] if re.search(r"imported_in_a_stage_\d", event["name"])]
    # Some files' names may be overwritten, too. Their events are "unknown".
    assert found
    assert {re.sub(r".*: ", "", name) for name in found} == {"<module>"}


@given(st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"])), st.integers(1, 200))
@example('"layer(0): attn"', 1000)
@example('"', 1)
@example('", "cat": "x', 7)
@example("a\\", 1000)
@example('ends with \\"', 1000)
@example("\x01\t\r", 1000)
def test_any_name_is_json_and_itself(name: str, piece: int) -> None:
    trace = json.loads(written(kineto(name.encode()), piece))
    try:  # A name that is written as JSON is taken as that.
        name = json.loads(f'"{name}"')
    except ValueError:
        pass
    assert [event["name"] for event in trace["traceEvents"]] == [name] * 2
    assert [event["args"]["name"] for event in trace["traceEvents"]] == [f"thread 1 ({name})"] * 2
    assert trace["autoprof"] == {"name": "a\\", "host": 'b, "name": "c'}


def test_what_is_no_utf_8_is_replaced() -> None:
    # Linux cuts the name of a thread after 15 bytes.
    trace = json.loads(written(kineto("ray::a学习学习".encode()[:14])))
    assert trace["traceEvents"][0]["name"] == "ray::a学习\N{REPLACEMENT CHARACTER}"


def test_plain_traces_are_not_touched() -> None:
    content = kineto(b"aten::mm")
    assert written(content, 5) == written(content) == content
