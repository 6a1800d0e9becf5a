"""`autoprof stacks` asks real processes that wait, groups them by their stacks, and leaves them unchanged."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from autoprof.base import identity as process_module
from autoprof.cli import nodes
from autoprof.cli import stacks as command
from autoprof.cli.documents import Lacking
from autoprof.cli.stacks import Answer
from autoprof.run import stacks
from autoprof.rundir.records import Frame, OpenSpan, ProcessStacks, Task, Thread
from tests.support import helpers, standing
from tests.support.helpers import autoprof, process_lines, started, wait_for

LONG_S = 120
SCRIPT = Path(standing.__file__)
NS = 1_000_000_000
NOW = 1_700_000_000 * NS


class Run:
    """The run of `standing.py`, and the output of `autoprof stacks` while its processes waited."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process = helpers.started(
            [sys.executable, str(SCRIPT)], cwd=folder, AUTOPROF="1", AUTOPROF_LOOK_MS="500", PYTHONUNBUFFERED="1"
        )
        self.pids = {
            kind: int(wait_for(folder / f"{kind}{rank}.ready", LONG_S)) for rank, kind in enumerate(standing.KINDS)
        }
        self.pids["fork"] = int(wait_for(folder / "fork.ready", LONG_S))
        wait_for(folder / "parent.ready", LONG_S)
        # No process reaps it before the end.
        while process_module.start_ticks(self.pids["dies"]) is not None:
            time.sleep(0.05)
        self.said = autoprof("stacks", "--json", cwd=folder)
        self.found = json.loads(self.said.stdout)
        self.shown = autoprof("stacks", "--wait", "0.2", cwd=folder)
        self.output, self.errors = self.process.communicate(timeout=LONG_S)

    def of(self, kind: str) -> dict[str, Any]:
        """The stacks of one of its processes."""
        (found,) = [each for each in self.found["processes"] if each["pid"] == self.pids[kind]]
        return dict(found)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("standing"))


def innermost(stacks: dict[str, Any]) -> list[str]:
    (main,) = [thread for thread in stacks["threads"] if thread.get("main")]
    return [frame["function"].rpartition(".")[2] for frame in main["frames"]]


def test_equal_stacks_are_one_group_and_the_late_rank_is_another(run: Run) -> None:
    assert (run.said.returncode, run.said.stderr) == (0, "")
    first = run.found["groups"][0]
    heading = (
        r"3 processes in held \(support/standing.py:\d+\) of update_actor, step 3, for [\d.]+ m?s: actor ranks 0-2"
    )
    assert re.fullmatch(heading, first["heading"])
    assert [frame["function"] for frame in first["frames"]][-2:] == ["all_reduce", "held"]
    assert all(not frame["file"].startswith(stacks.OWN) for frame in first["frames"])
    (late,) = [each for each in run.found["groups"] if each["heading"].endswith(": actor rank 3")]
    assert [frame["function"] for frame in late["frames"]][-2:] == ["collate", "held"]
    assert late["processes"] == [f"{process_module.HOST}-{run.pids['collate']}"]


def test_a_deadlock_shows_both_threads(run: Run) -> None:
    stacks = run.of("locks")
    assert stacks["by"] == "itself"
    assert innermost(stacks)[-2:] == ["locks", "one"]
    (other,) = [thread for thread in stacks["threads"] if thread["name"] == "other"]
    assert other["frames"][-1]["function"].endswith("one")
    assert other["native"] > 0


def test_py_spy_sees_a_call_in_c_that_keeps_the_lock(run: Run) -> None:
    stacks = run.of("c")
    assert stacks["by"] == "py-spy"
    assert innermost(stacks)[-1] == "c"
    assert [(span["kind"], span["name"]) for span in stacks["spans"]] == [("step", "step"), ("stage", "update_actor")]
    (group,) = [each for each in run.found["groups"] if each["heading"].endswith(": actor rank 5")]
    assert " in c (support/standing.py:" in group["heading"]
    # Its content is also in the run.
    (folder,) = run.found["folders"]
    written = Path(folder.partition(":")[2]) / f"{process_module.HOST}-{run.pids['c']}.json"
    # py-spy does not know the kernel's number of a thread of Python 3.10; a 0 is left out of one of them.
    known = msgspec.json.decode(written.read_bytes(), type=ProcessStacks)
    assert known == msgspec.convert({key: stacks[key] for key in json.loads(written.read_text())}, ProcessStacks)


def test_tasks_say_what_they_wait_on(run: Run) -> None:
    tasks = run.of("samples")["tasks"]
    searching = [task for task in tasks if task["frames"][0]["function"] == "search"]
    assert len(searching) == 8
    assert {task["waits_on"] for task in searching} <= {"Future", "its turn"}
    (waiting,) = [task["waits_on"] for task in tasks if "run_all" in task["frames"][0]["function"]]
    assert re.fullmatch(r"8 of 8 gathered: Task-\d+, Task-\d+, Task-\d+, \.\.\.", waiting)


def test_a_forked_child_answers_for_itself(run: Run) -> None:
    stacks = run.of("fork")
    assert innermost(stacks)[-1] == "held"
    assert [span["name"] for span in stacks["spans"]] == ["of_the_fork"]


def test_the_dead_are_named_with_what_they_were_at(run: Run) -> None:
    (gone,) = run.found["absent"]
    assert (gone["pid"], gone["state"]) == (run.pids["dies"], "gone")
    assert [span["name"] for span in gone["spans"]] == ["step", "update_actor"]


def test_the_run_goes_on_unchanged(run: Run, tmp_path: Path) -> None:
    plain = started([sys.executable, str(SCRIPT)], cwd=tmp_path, PYTHONUNBUFFERED="1")
    output, errors = plain.communicate(timeout=LONG_S)
    assert (run.process.returncode, run.output) == (plain.returncode, output)
    assert run.process.returncode == 5
    assert [line for line in run.errors.splitlines() if "AUTOPROF" not in line] == errors.splitlines()


def test_the_page_names_the_file_of_the_run(run: Run) -> None:
    # It was not waited for: py-spy saw all.
    assert run.shown.returncode == 0
    assert "actor ranks 0-2" in run.shown.stdout
    assert "gone: " in run.shown.stdout
    (folder,) = re.findall(r"^files: [^:]+:(.+)$", run.shown.stdout, re.MULTILINE)
    assert json.loads((Path(folder) / "why.json").read_text())["reason"] == "autoprof stacks was called"
    assert not list(Path(folder).parent.glob(".*"))


def test_a_run_that_is_over_is_not_asked(run: Run) -> None:
    done = autoprof("stacks", cwd=run.folder)
    assert done.returncode == 1
    assert "is not running: its state is " in done.stderr
    assert "; autoprof doctor " in done.stderr
    assert autoprof("stacks", "nothing", cwd=run.folder).returncode == 1
    assert autoprof("stacks", "--wait", "-1", cwd=run.folder).returncode == 2


def process(number: int, *frames: tuple[str, str, int], spans: Any = (), **values: Any) -> ProcessStacks:
    """A process whose main thread stands there, in these spans."""
    stack = Thread(name="MainThread", main=True, frames=[Frame(*frame) for frame in frames], spans=[*range(len(spans))])
    return ProcessStacks(
        host="n1", pid=number, unix_ns=NOW, process=f"worker {number}", spans=[*spans], threads=[stack], **values
    )


def stage(name: str, rank: int, age_s: int = 60) -> list[OpenSpan]:
    return [
        OpenSpan(kind="step", name="step", step=41, role="trainer", rank=0, start_ns=NOW - 2 * age_s * NS),
        OpenSpan(kind="stage", name=name, step=41, role="actor", rank=rank, start_ns=NOW - age_s * NS),
    ]


WAIT = ("wait", "/usr/lib/python3.11/threading.py", 331)
REDUCE = ("all_reduce", "/x/site-packages/torch/x.py", 9)
COLLATE = ("collate", "/home/me/data/collate.py", 31)


def test_a_heading_says_who_is_where_since_when() -> None:
    ranks = [process(n, REDUCE, WAIT, spans=stage("update_actor", n, 720)) for n in range(64) if n != 17]
    late = process(17, COLLATE, spans=stage("update_actor", 17, 600))
    lines = [command.heading(group, "process", "processes") for group in command.at_work([late, *ranks])]
    assert lines == [
        "63 processes in all_reduce (torch/x.py:9) of update_actor, step 41, for 12 min 0 s: actor ranks 0-16,18-63",
        "1 process in collate (data/collate.py:31) of update_actor, step 41, for 10 min 0 s: actor rank 17",
    ]


def test_samples_and_tools_are_named_with_their_ids_and_age() -> None:
    tools = [
        OpenSpan(kind="tool", name="search", step=41, ids={"sample": n, "turn": 2}, start_ns=NOW - (100 + n) * NS)
        for n in range(40)
    ]
    tasks = [Task(name=f"Task-{n}", frames=[Frame(*COLLATE)], waits_on="Future", spans=[n]) for n in range(40)]
    told = ProcessStacks(host="n1", pid=7, unix_ns=NOW, process="loop", spans=tools, tasks=tasks)
    lines = list(command.page_lines([told], []))
    assert "    tool search: 40, the oldest for 2 min 19 s" in lines
    assert "        sample=39 turn=2, step 41, for 2 min 19 s (n1-7)" in lines
    assert (
        "40 tasks in collate (data/collate.py:31) of search, step 41, for 2 min 19 s, waits on Future: loop (n1-7)"
        in lines
    )


def test_a_page_of_many_stacks_stays_a_page() -> None:
    def deep(number: int) -> Iterator[tuple[str, str, int]]:
        return ((f"f{place}", f"/home/me/{number}.py", place) for place in range(200))

    many = [process(n, *deep(n), spans=stage("update_actor", n)) for n in range(500)]
    absent = [
        Lacking(host="n2", pid=n, process="", state="running", reason="it did not answer", spans=[]) for n in range(90)
    ]
    lines = list(command.page_lines(many, absent))
    assert len(lines) < 450
    assert "... 476 processes more, with 476 other stacks" in lines
    assert "... 70 processes more without an answer" in lines


def test_nodes_that_share_a_disk_tell_of_a_process_once() -> None:
    def absent(host: str, pid: int, state: str) -> Lacking:
        return Lacking(host=host, pid=pid, process="", state=state, reason=state, spans=[])

    def answer(host: str, *told: Lacking) -> Answer:
        return Answer(host=host, folder="/shared", files={}, absent=[*told], py_spy="", problem="")

    both = [
        answer("n1", absent("n1", 1, "running"), absent("n2", 2, "elsewhere"), absent("n3", 3, "elsewhere")),
        answer("n2", absent("n1", 1, "elsewhere"), absent("n2", 2, "gone"), absent("n2", 9, "running")),
        answer("n2", absent("n2", 4, "elsewhere")),
    ]
    told = [(each.host, each.pid, each.state) for each in command._absent(both, {"n2-9.json"})]
    assert told == [("n1", 1, "running"), ("n3", 3, "elsewhere"), ("n2", 2, "gone"), ("n2", 4, "elsewhere")]


def ask(folder: Path) -> Answer:
    return msgspec.convert(nodes.ask(str(folder), "now", b"{}", 0.1, False, True), Answer)


def asked(folder: Path, **values: Any) -> Answer:
    """The answer for a run in a folder, of which this process is a part that does not answer."""
    own = {
        "host": process_module.HOST,
        "pid": os.getpid(),
        "process": "this test",
        "hooks": {"made/up": {"called": True}},
    }
    own |= values
    (folder / "journal").mkdir(parents=True)
    (folder / "journal" / f"{own['host']}-{own['pid']}.jsonl").write_text(process_lines(**own))
    return ask(folder)


def test_without_permission_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "py-spy"
    program.write_text("#!/bin/sh\necho 'Error: Permission Denied: Try running again' >&2\necho by sudo >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    answer = asked(tmp_path / "run")
    ((pid, state, reason),) = [(each.pid, each.state, each.reason) for each in answer.absent]
    assert (pid, state, reason) == (os.getpid(), "running", "it did not answer within 0.1 s")
    (line,) = command._spy_problems([answer], native=False)
    assert line.startswith(
        f"{process_module.HOST}: py-spy may not look into the processes: call autoprof stacks as root"
    )


def test_without_py_spy_it_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, path: None)
    (line,) = command._spy_problems([asked(tmp_path / "run")], native=False)
    assert line.endswith(
        "there is no py-spy, which sees processes that do not answer: pip install 'autoprof-rl[stacks]'"
    )


def test_a_process_in_which_nothing_was_called_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, path: None)
    answer = asked(tmp_path / "run", hooks={})
    assert [each.reason for each in answer.absent] == ["none of autoprof's hooks was called in it"]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_of_pools_are_looked_at_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, path: None)
    worker = multiprocessing.get_context(method).Process(target=time.sleep, args=(60,))
    worker.start()
    while not Path(f"/proc/{worker.pid}/cmdline").read_bytes():  # it is being replaced by its program
        time.sleep(0.01)
    try:
        reasons = {each.pid: each.reason for each in asked(tmp_path / "run").absent}
    finally:
        worker.kill()
        worker.join()
    said = f"it is a child of process {os.getpid()} and runs without autoprof"
    assert reasons.get(worker.pid or 0) == said


def test_a_process_of_another_host_is_waited_for(tmp_path: Path) -> None:
    answer = asked(tmp_path / "run", host="n7", pid=5)
    assert [(each.host, each.state) for each in answer.absent] == [("n7", "elsewhere")]


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "stacks").write_text("")
    assert "stacks" in ask(tmp_path / "run").problem
