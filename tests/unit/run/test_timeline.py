"""The timeline file: its content, the times of writing, and whole lines after threads, forks and a sudden end."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoprof.base import files
from autoprof.base import identity as process_module
from autoprof.run import journal
from autoprof.run.journal import AT_ONCE, Span
from autoprof.run.runtime import Runtime
from autoprof.rundir import layout, processes
from tests.support import helpers


@pytest.fixture
def run(made: Callable[..., Runtime]) -> Runtime:
    return made()


def begin(run: Runtime, kind: str = "sample", name: str = "x", **values: Any) -> Span:
    span = Span(run.timeline, kind, name, **({"step": 2, "role": "agent_loop", "rank": None} | values))
    if kind not in AT_ONCE:
        run.timeline.running.add(span)
    return span


def written(run: Runtime) -> list[dict[str, Any]]:
    """Return the lines of this process, including the first one."""
    path = run.rundir.process_file("journal", ".jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def kinds(run: Runtime, ending: str = ".jsonl") -> list[str]:
    """Return the kinds of the lines of this process. The beginning of a part may repeat the start of a span."""
    lines = run.rundir.process_file("journal", ending).read_text().splitlines()
    return [json.loads(line)["kind"] for line in dict.fromkeys(lines)]


def names(run: Runtime) -> list[str]:
    return [span["name"] for span in helpers.spans(run.rundir.path)]


@pytest.fixture
def one_going_on(run: Runtime, monkeypatch: pytest.MonkeyPatch) -> Span:
    """Keep one sample open, as in a batch. No buffered line becomes old, even on a slow machine."""
    monkeypatch.setattr(journal, "_FLUSH_AFTER_NS", 10**15)
    return begin(run, name="long")


def test_the_first_line_says_which_process_it_is(run: Runtime) -> None:
    before = time.time_ns()
    begin(run, "stage").end()
    process, *_ = written(run)
    assert (process["kind"], process["host"], process["pid"]) == ("process", process_module.HOST, os.getpid())
    assert before <= process["clock"]["unix_ns"] <= time.time_ns()
    assert process["clock"]["monotonic_ns"] <= time.monotonic_ns()
    assert process["version"]


def test_a_line_holds_what_is_known_and_nothing_else(run: Runtime) -> None:
    begin(run, "stage", "update_actor", step=None, role="actor", rank=3).end()
    (line,) = helpers.spans(run.rundir.path)
    assert list(line) == ["kind", "name", "step", "role", "rank", "start_ns", "end_ns", "stage_kind"]
    assert (line["step"], line["rank"], line["stage_kind"]) == (None, 3, "update_actor")
    begin(run, "turn", ids={"sample": 7}).end(ValueError("secret"), {"response_tokens": 5})
    run.timeline.flush()
    line = helpers.spans(run.rundir.path)[-1]
    assert "stage_kind" not in line
    assert (line["error"], line["ids"], line["counts"]) == ("ValueError", {"sample": 7}, {"response_tokens": 5})
    assert "secret" not in json.dumps(line)


@pytest.mark.parametrize("kind", ["step", "stage", "window"])
def test_large_spans_are_written_at_once_with_what_was_kept(run: Runtime, one_going_on: Span, kind: str) -> None:
    for number in range(3):
        begin(run, name=str(number)).end()
    assert written(run) == []
    begin(run, kind, "last").end()
    assert names(run) == ["0", "1", "2", "last"]


def test_many_are_written_together(run: Runtime, one_going_on: Span, monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[int] = []
    append = files.OwnFile.append
    monkeypatch.setattr(files.OwnFile, "append", lambda file, content: writes.append(1) or append(file, content))
    run.timeline._write_ns = 10**12
    for _ in range(3 * journal._FLUSH_LINES + 1):
        begin(run).end()
    assert len(writes) == 3
    one_going_on.end()
    run.timeline.flush()
    assert len(names(run)) == 3 * journal._FLUSH_LINES + 2


def test_one_that_is_old_is_written_with_the_next(
    run: Runtime, one_going_on: Span, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(run, name="first").end()
    monkeypatch.setattr(journal, "_FLUSH_AFTER_NS", 0)
    begin(run, name="second").end()
    assert names(run) == ["first", "second"]


def test_when_nothing_is_going_on_it_is_written(run: Runtime) -> None:
    outer = begin(run, name="outer")
    begin(run, "turn", "inner").end()
    assert written(run) == []
    run.timeline._write_ns = 0
    outer.end()
    assert names(run) == ["inner", "outer"]


def test_a_slow_disk_is_not_written_to_each_time(run: Runtime) -> None:
    begin(run, name="first").end()
    run.timeline._write_ns = 10**12
    begin(run, name="second").end()
    assert names(run) == ["first"]
    run.timeline.flush()
    assert names(run) == ["first", "second"]


def test_a_span_that_is_dropped_is_left_out_and_not_waited_for(run: Runtime, one_going_on: Span) -> None:
    begin(run, name="kept").end()
    one_going_on.drop()
    run.timeline._write_ns = 0
    begin(run, name="last").end()
    assert names(run) == ["kept", "last"]


def test_text_that_is_no_utf8_does_not_cost_the_others(run: Runtime, one_going_on: Span) -> None:
    begin(run, name="before").end()
    begin(run, name="b\udcff", ids={"\udc80": "\udc81"}).end()
    begin(run, "stage", "after").end()
    before, odd, after = helpers.spans(run.rundir.path)
    assert (before["name"], odd["name"], after["name"]) == ("before", "b?", "after")
    assert odd["ids"] == {"?": "?"}


@pytest.mark.fault("the disk is full while the timeline is written", "goes on", "spans; whole lines are left")
def test_a_full_disk_leaves_whole_lines_and_is_said_once(run: Runtime, caplog: pytest.LogCaptureFixture) -> None:
    begin(run, "stage", "fits").end()
    path = run.rundir.process_file("journal", ".jsonl")
    size = path.stat().st_size
    with helpers.room_for(size + 50):
        for _ in range(3):
            begin(run, "stage", "does not").end()
    assert path.stat().st_size == size
    begin(run, "stage", "fits again").end()
    assert names(run) == ["fits", "fits again"]
    assert caplog.text.count("can't write to") == 1


def test_a_file_or_folder_that_somebody_removed_begins_anew(run: Runtime) -> None:
    path = run.rundir.process_file("journal", ".jsonl")
    for remove in (path.unlink, lambda: (path.unlink(), path.parent.rmdir())):
        begin(run, "stage", "before").end()
        remove()
        begin(run, "stage", "after").end()
        assert kinds(run) == ["process", "begun", "stage"]
        assert names(run) == ["after"]


def test_the_file_of_an_earlier_process_with_the_same_pid_is_unchanged(run: Runtime) -> None:
    begin(run, "stage", "earlier").end()
    before = written(run)
    for name, count in (("second", 2), ("third", 3)):
        journal._state.after_fork_in_child()  # as a new process: nothing is known of the file
        begin(run, "stage", name).end()
        path = run.rundir.process_file("journal", f".{count}.jsonl")
        assert kinds(run, f".{count}.jsonl") == ["process", "begun", "stage"]
        assert [span["name"] for span in helpers.spans(path)] == [name]
    assert written(run) == before


def test_after_a_move_a_new_file_begins_with_the_open_spans(run: Runtime, tmp_path: Path) -> None:
    outer = begin(run, "stage", "outer")
    os.rename(run.rundir.path, tmp_path / "moved")
    begin(run, "stage", "before the look").end()
    run.timeline.look()
    assert kinds(run) == ["process", "begun", "memory"]
    outer.end()
    assert names(run) == ["outer"]
    assert [span["name"] for span in helpers.spans(tmp_path / "moved")] == ["before the look"]


def test_a_copy_in_the_place_of_the_file_is_not_written_to(run: Runtime, tmp_path: Path) -> None:
    begin(run, "stage", "first").end()
    before = written(run)
    os.rename(run.rundir.path, tmp_path / "moved")
    shutil.copytree(tmp_path / "moved", run.rundir.path)
    run.timeline.look()
    begin(run, "stage", "second").end()
    assert written(run) == before
    second = run.rundir.process_file("journal", ".2.jsonl")
    assert [span["name"] for span in helpers.spans(second)] == ["second"]


def test_a_file_that_the_program_closed_is_opened_again(run: Runtime) -> None:
    for name in ("first", "second"):
        begin(run, "stage", name).end()
        own = run.rundir.process_file("journal").stat().st_ino
        os.closerange(700, 1024)
    begin(run, "stage", "third").end()
    assert run.rundir.process_file("journal").stat().st_ino == own
    assert names(run) == ["first", "second", "third"]


def test_the_descriptor_is_high_and_is_closed_at_the_end(run: Runtime) -> None:
    before = set(os.listdir("/proc/self/fd"))
    begin(run, "stage").end()
    (own,) = set(os.listdir("/proc/self/fd")) - before
    assert int(own) >= 700
    assert not os.get_inheritable(int(own))
    run.timeline.leave()
    assert own not in os.listdir("/proc/self/fd")


def test_a_disk_that_reports_only_later_that_it_is_full_is_reported_once(
    run: Runtime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    synced: list[int] = []

    def full(number: int) -> None:
        synced.append(number)
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(files.os, "fdatasync", full)
    for count in (1, 2):
        begin(run, "stage").end()
        run.timeline.look()
        run.timeline.look()
        assert len(synced) == count
    assert caplog.text.count("Disk quota exceeded") == 1


def test_the_exit_line_counts_steps_and_exceptions(run: Runtime) -> None:
    for number in (2, 3):
        begin(run, "step", "step", step=number).end()
    begin(run, "stage").end(ValueError("x"))
    run.timeline.leave()
    last = written(run)[-1]
    assert (last["kind"], last["steps"], last["raised"]) == ("exit", 2, 1)


def test_no_more_are_kept_than_memory_is_for(
    run: Runtime, one_going_on: Span, caplog: pytest.LogCaptureFixture
) -> None:
    assert run.timeline._writing.acquire(blocking=False)  # a write that hangs, in another thread
    run.timeline._write_began = 1
    for _ in range(journal._MAX_LINES + 10):
        begin(run).end()
    assert len(run.timeline._lines) == journal._MAX_LINES
    assert caplog.text.count("spans are left out") == 1
    run.timeline._writing.release()
    begin(run, "stage").end()
    assert len(names(run)) == journal._MAX_LINES + 1
    # The line is repeated in each part.
    errors = [line for line in written(run) if line["kind"] == "error"]
    assert {(line["where"], line["count"]) for line in errors} == {("timeline", 10)}


def test_lost_lines_add_up_and_the_exit_line_stays_the_last(run: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(run, "stage").end()
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    for _ in range(2):
        with monkeypatch.context() as context:
            context.setattr(files, "_append_all", full)
            begin(run, "stage").end()
        begin(run, "stage").end()
    with monkeypatch.context() as context:
        context.setattr(files, "_append_all", full)
        begin(run, "stage").end()
    run.timeline.leave()
    lines = written(run)
    assert [line["count"] for line in lines if line["kind"] == "error"] == [2, 4, 6]
    assert lines[-1]["kind"] == "exit"
    (process,) = processes.read(run.rundir.path)
    assert (process.state, process.errors["timeline"].count) == ("exited", 6)


def open_names(run: Runtime) -> list[str]:
    (process,) = processes.read(run.rundir.path)
    return [span.name for span in process.spans]


def test_what_goes_on_is_on_the_timeline(run: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    step, stage = begin(run, "step", "step"), begin(run, "stage", "update", ids={"replica": 1})
    sample = begin(run, name="sample")
    assert open_names(run) == ["step", "update"]
    run.timeline.look()
    assert open_names(run) == ["step", "update"]
    monkeypatch.setattr(journal, "_LONG_NS", 0)
    run.timeline.look()
    run.timeline.look()
    assert open_names(run) == ["step", "update", "sample"]
    assert kinds(run) == ["process", "begun", "begun", "begun"]
    stage.end()
    assert open_names(run) == ["step", "sample"]
    sample.drop()
    assert open_names(run) == ["step"]
    step.end()
    assert open_names(run) == []


def test_the_start_of_a_timer_is_written_at_once_unless_timers_take_too_much_time(
    run: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = begin(run, "step", "step")
    timer = begin(run, "timer", "reward")
    assert open_names(run) == ["step", "reward"]
    monkeypatch.setattr(journal, "_EARLY_NS", -(10**18))
    begin(run, "timer", "old_log_prob")
    assert open_names(run) == ["step", "reward"]
    timer.end()
    step.end()
    assert open_names(run) == []


def test_a_process_that_stands_gives_signs_of_life(run: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = begin(run, "stage", "update")
    run.timeline.look()
    assert kinds(run) == ["process", "begun"]
    monkeypatch.setattr(journal, "MAX_SILENCE_NS", 0)
    before = time.time_ns()
    run.timeline.look()
    (process,) = processes.read(run.rundir.path)
    assert before <= process.last_ns <= time.time_ns()
    stage.end()
    lines = len(written(run))
    run.timeline.look()
    assert len(written(run)) == lines


def test_a_span_that_was_interrupted_is_open_until_the_next_one(run: Runtime) -> None:
    begin(run, "step", "step", step=2)
    begin(run, "step", "step", step=3)
    begin(run, "stage", "update", rank=0)
    other = begin(run, "stage", "update", rank=1)
    begin(run, "stage", "update", rank=0)
    (process,) = processes.read(run.rundir.path)
    assert [(span.name, span.step, span.rank) for span in process.spans] == [
        ("step", 3, None),
        ("update", 2, 1),
        ("update", 2, 0),
    ]
    other.end()
    assert open_names(run) == ["step", "update"]


def test_what_is_open_is_at_the_end_of_a_large_file(run: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "PART_BYTES", 10_000)
    monkeypatch.setattr(processes, "_TAIL_BYTES", (30_000,))
    run.timeline.begin()
    begin(run, "step", "step")
    for _ in range(20):
        for _ in range(50):
            begin(run, "stage", "short").end()
        run.timeline.look()
    assert run.rundir.process_file("journal").stat().st_size > 60_000
    assert open_names(run) == ["step"]


def test_a_part_of_a_large_file_has_the_hooks_and_errors(run: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "PART_BYTES", 10_000)
    monkeypatch.setattr(processes, "_TAIL_BYTES", (30_000,))
    run.timeline.begin()
    hooks = [
        SimpleNamespace(key=f"x/{name}", passive=False, described=dict) for name in ("applied", "failed", "skipped")
    ]
    run.hooks.applied(hooks[0])
    run.hooks.failed(hooks[1], "TypeError: x")
    run.hooks.skipped(hooks[2], "x has no y")
    run.hooks.called("x/applied")
    # The place of an error may have the name of a hook.
    run.hooks.error("x/applied", "an error")
    run.hooks.error("elsewhere", "another error")
    assert [line["kind"] for line in written(run)] == ["process", *["hook"] * 4, "error", "error"]
    while run.rundir.process_file("journal").stat().st_size < 60_000:
        begin(run, "stage", "short").end()
    (process,) = helpers.processes_of(run.rundir.path)
    states = {key: (hook["state"], hook["reason"], bool(hook["called"])) for key, hook in process["hooks"].items()}
    assert states == {
        "x/applied": ("applied", "", True),
        "x/failed": ("failed", "TypeError: x", False),
        "x/skipped": ("skipped", "x has no y", False),
    }
    assert {where: error["last"] for where, error in process["errors"].items()} == {
        "x/applied": "an error",
        "elsewhere": "another error",
    }
    assert processes.summary(processes.read(run.rundir.path), {})["recipes"] == ["x"]


def test_no_more_samples_are_open_than_a_reader_wants(run: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "_LONG_NS", 0)
    for number in range(300):
        begin(run, name=f"s{number}")
    run.timeline.look()
    run.timeline.look()
    assert open_names(run) == [f"s{number}" for number in range(256)]


def is_open(number: int) -> bool:
    return os.path.lexists(f"/proc/self/fd/{number}")


def forked(child: Callable[[], None]) -> None:
    """Run a function in a forked child, which then ends by os._exit."""
    pid = os.fork()
    if pid == 0:
        try:
            child()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def test_a_forked_child_has_a_file_of_its_own_and_none_of_its_parents_lines(run: Runtime, tmp_path: Path) -> None:
    begin(run, "stage", "before").end()
    outer = begin(run, name="parents")
    begin(run, name="kept").end()
    lock = run.timeline._writing
    assert lock.acquire(blocking=False)  # held by a thread that the child does not have

    def child() -> None:
        outer.end()
        begin(run, name="childs").end()
        run.timeline.flush()
        open_files = [os.readlink(f"/proc/self/fd/{number}") for number in range(700, 1024) if is_open(number)]
        (tmp_path / "open").write_text(" ".join(path for path in open_files if "/journal/" in path))

    forked(child)
    lock.release()
    outer.end()
    run.timeline.flush()
    by_file = {
        path.name: [span["name"] for span in helpers.spans(path)] for path in run.rundir.path.glob("journal/*.jsonl")
    }
    own = f"{process_module.HOST}-{os.getpid()}.jsonl"
    assert by_file.pop(own) == ["before", "kept", "parents"]
    assert list(by_file.values()) == [["childs"]]
    (path,) = by_file
    assert (tmp_path / "open").read_text() == str(run.rundir.path / "journal" / path)


@given(
    amounts=st.lists(st.integers(1, 300), min_size=1, max_size=4),
    stages=st.integers(2, 60),
    many=st.integers(1, 50),
    forks=st.booleans(),
)
def test_threads_and_forks_write_every_line_once_in_the_order_of_ends(
    made: Any, tmp_path_factory: pytest.TempPathFactory, amounts: list[int], stages: int, many: int, forks: bool
) -> None:
    run = made()
    run.timeline = journal.Timeline(layout.RunDir(tmp_path_factory.mktemp("run")))
    folder = run.timeline._run.path
    before, journal._FLUSH_LINES = journal._FLUSH_LINES, many

    def work(thread: int, amount: int) -> None:
        for number in range(amount):
            kind = "stage" if number % stages == stages - 1 else "sample"
            begin(run, kind, f"{os.getpid()} {thread} {number}").end()

    def all_threads() -> None:
        threads = [threading.Thread(target=work, args=each) for each in enumerate(amounts)]
        for thread in threads:
            thread.start()
        if forks and len(threads) > 1 and os.getpid() == parent:
            forked(lambda: (work(99, 20), run.timeline.flush()))
        for thread in threads:
            thread.join()

    parent = os.getpid()
    try:
        all_threads()
    finally:
        journal._FLUSH_LINES = before
    run.timeline.flush()
    expected = Counter(
        f"{parent} {thread} {number}" for thread, amount in enumerate(amounts) for number in range(amount)
    )
    for path in folder.glob("journal/*.jsonl"):
        assert path.read_bytes().endswith(b"\n")
        found = [span["name"] for span in helpers.spans(path)]
        if path.stem.endswith(f"-{parent}"):
            assert Counter(found) == expected
        else:
            child = path.stem.rpartition("-")[2]
            assert found == [f"{child} 99 {number}" for number in range(20)]
        for thread in range(len(amounts)):
            numbers = [int(name.split()[2]) for name in found if name.split()[1] == str(thread)]
            assert numbers == sorted(numbers)


@pytest.mark.fault("a process is killed with SIGKILL", "goes on", "the spans of its last second")
@pytest.mark.parametrize("after_lines", [1, 300, 2000])
def test_a_process_that_is_killed_leaves_whole_lines(run: Runtime, after_lines: int) -> None:
    reader, writer = os.pipe()

    def child() -> None:
        long = begin(run, name="long")
        for number in range(100_000):
            begin(run, name=str(number)).end()
            if number == after_lines:
                os.write(writer, b"x")
        long.end()

    pid = os.fork()
    if pid == 0:
        try:
            child()
        finally:
            os._exit(0)
    os.read(reader, 1)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    # If a process is killed, Linux may end its write between two pages, so the last line may be cut off.
    texts = [path.read_text() for path in run.rundir.path.glob("journal/*.jsonl")]
    lines = [json.loads(line) for text in texts for line in text.splitlines(keepends=True) if line.endswith("\n")]
    found = [int(line["name"]) for line in lines if line["kind"] != "process"]
    assert found == list(range(len(found)))
    assert len(found) > after_lines - journal._FLUSH_LINES


@pytest.mark.parametrize(
    ("content", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n", "550.54.15"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  575.57.08  Release Build\nGCC 12.3", "575.57.08"),
        ("", None),
    ],
)
def test_a_journal_names_torch_and_the_driver(
    run: Runtime, monkeypatch: pytest.MonkeyPatch, content: str, version: str | None
) -> None:
    monkeypatch.setattr(journal.files, "text", lambda path, _=-1: content if "nvidia" in str(path) else "")
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__version__="2.99.0"))  # type: ignore[arg-type]
    run.timeline.begin_part()
    versions = written(run)[0]["versions"]
    assert versions["torch"] == "2.99.0"
    assert versions.get("nvidia driver") == version


def test_a_step_that_is_interrupted_at_its_start_has_all_attributes_of_a_step(run: Runtime) -> None:
    with mock.patch.object(run.timeline, "write", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        begin(run, "step")
    (span,) = run.timeline.open()
    assert span.task is None
