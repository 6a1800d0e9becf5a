"""Findings about stuck steps."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest

from autoprof.base import identity
from autoprof.cli import hung as cli_hung
from autoprof.cli.main import main
from autoprof.report import build, causes, findings, hang_state, places
from autoprof.report.model import Finding
from autoprof.rundir import runs
from autoprof.rundir.records import BY_PY_SPY_OF_ACTOR, Frame, MemoryLine, MemoryState, Task, Thread
from tests.support.hung_runs import ALL_REDUCE, IDLE, MIN, REWARD, HungRun, finding_of, flight_record, join, said


def test_a_sample_that_waits_in_a_tool_is_named(hung: HungRun) -> None:
    ids = {"sample": "63", "rollout": 2}
    spans = [hung.span("sample", "tool_agent", 11.5, **ids), hung.span("tool", "search", 11, **ids)]
    task = Task(name="Task-9", frames=[Frame("Search.call", "/home/u/search.py", 12)], waits_on="Future", spans=[1])
    hung.stack(IDLE, process="ray::AgentLoopWorker", spans=spans, tasks=[task])
    assert said(hung) == "sample 63, rollout 2 has waited 11 min 0 s in tool search; it is in search.py:12 call"


def test_a_reward_that_another_process_computes_is_told_with_its_place_there(hung: HungRun) -> None:
    loop = [Frame("_compute_score", "/env/lib/python3.11/site-packages/verl/agent_loop.py", 1026)]
    spans = [
        hung.span("sample", "tool_agent", 11, sample="63"),
        hung.span("reward", "compute_score", 10.5, sample="63"),
    ]
    task = Task(name="Task-9", frames=loop, spans=[0, 1])
    hung.stack(IDLE, process="ray::AgentLoopWorker", spans=spans, tasks=[task])
    hung.stack(IDLE, process="ray::RewardLoopWorker", threads=[Thread(name="pool_0", ident=2, frames=[*REWARD])])
    assert said(hung) == (
        "sample 63 has waited 10 min 30 s in reward compute_score; ray::RewardLoopWorker (pid 1002 on n2) is in "
        "reward.py:44 fetch_score"
    )


def test_samples_that_take_as_long_as_usual_are_not_named(hung: HungRun) -> None:
    lines = [hung.line("tool", "search", "agent_loop", None, hung.began - n, 300.0) for n in range(1, 5)]
    hung.process(1001, lines, host="n2")
    hung.stack(IDLE, process="ray::AgentLoopWorker", spans=[hung.span("tool", "search", 11, sample="63")])
    assert "search" not in finding_of(hung).text


@pytest.mark.parametrize(
    ("free", "problem"), [(0, "no free block"), (9, "none running; it is in slow_scheduler.py:8 schedule")]
)
def test_an_engine_that_runs_no_request_is_named(hung: HungRun, free: int, problem: str) -> None:
    window = hung.span("window", "rollout", 12, role="rollout", replica=1)
    engine = {"running": 0, "waiting": 40, "free_blocks": free, "total_blocks": 900, "longest_s": 700.0}
    frames = (Frame("schedule", "/home/u/slow_scheduler.py", 8),)
    hung.stack(frames, process="VLLM::EngineCore", spans=[window], engine=engine)
    hung.stack(IDLE, process="ray::AgentLoopWorker", spans=[hung.span("turn", "generate", 11.9, sample="6")])
    assert said(hung) == f"replica 1 has 40 requests waiting and {problem}"


def test_a_rank_in_an_earlier_stage_is_named(hung: HungRun) -> None:
    for rank in range(4):
        behind = rank == 2
        stage = "compute_log_prob" if behind else "update_actor"
        hung.stack(IDLE, rank=rank, role="actor", stage=stage, minutes=12 if behind else 11)
    assert said(hung).startswith("actor rank 2 has been in compute_log_prob for 12 min 0 s, 3 others in update_actor")


LOCKS = """\
import threading
first, second = threading.Lock(), threading.Lock()

def one():
    with first:
        with second:
            pass

def two():
    with second:
        with first:
            pass
"""


def test_a_deadlock_of_two_locks_is_told_with_its_process(hung: HungRun, tmp_path: Path) -> None:
    source = tmp_path / "score.py"
    source.write_text(LOCKS)
    threads = [
        Thread(name="scorer-1", ident=2, frames=[Frame("one", str(source), 6)]),
        Thread(name="scorer-2", ident=3, frames=[Frame("two", str(source), 11)]),
    ]
    hung.stack(IDLE, process="ray::RewardWorker", threads=threads, spans=[hung.span("reward", "score", 12, sample="1")])
    assert said(hung) == (
        "deadlock of two locks in ray::RewardWorker (pid 1001 on n2): scorer-1 waits for second in score.py:6 one, "
        "and scorer-2 waits for first in score.py:11 two"
    )


def test_actors_that_all_call_themselves_rank_0_are_told_by_title(hung: HungRun) -> None:
    hung.stack(REWARD, rank=0, role="actor", stage="update_actor", process="ray::Judge.score")
    hung.stack(IDLE, rank=0, role="actor", stage="update_actor", process="ray::Writer.write")
    assert said(hung).startswith("ray::Judge (pid 1001 on n2) is in reward.py:44 fetch_score")


def test_a_thread_that_waits_for_a_queue_is_told_with_its_place(hung: HungRun) -> None:
    frames = [Frame("take", "/home/u/train.py", 37), Frame("get", "/env/lib/python3.11/queue.py", 180)]
    frames.append(Frame("Condition.wait", "/env/lib/python3.11/threading.py", 327))
    hung.stack(frames, rank=0, role="actor", stage="update_actor")
    assert said(hung).startswith("actor rank 0 waits in train.py:37 take of update_actor")


def test_ranks_that_all_wait_for_one_another_are_told_with_their_places(hung: HungRun) -> None:
    frames = [Frame("exchange", "/home/u/train.py", 12), Frame("recv", "/e/site-packages/torch/distributed/c.py", 9)]
    for rank in range(2):
        hung.stack(frames, rank=rank, role="actor", stage="update_actor")
    found = finding_of(hung)
    assert "actor rank 0 waits in train.py:12 exchange of update_actor (in a collective)" in found.text
    assert any("actor rank 1 waits in train.py:12 exchange" in line for line in found.evidence)


def test_what_autoprof_itself_does_is_not_the_users(hung: HungRun) -> None:
    frames = [*REWARD, Frame("start", "/e/site-packages/autoprof/capture/profilers/torch.py", 88)]
    frames.append(Frame("<module>", "/e/site-packages/sympy/core.py", 4))
    hung.stack(frames, rank=0, role="actor", stage="update_actor")
    assert "is in autoprof, which starts or ends a profiler, torch.py:88 start" in said(hung)


def test_an_actor_that_waits_for_itself_is_named(hung: HungRun, tmp_path: Path) -> None:
    source = tmp_path / "judge.py"
    source.write_text(
        "def score(self):\n    me = ray.get_runtime_context().current_actor\n    ray.get(me.x.remote())\n"
    )
    ray = "/env/lib/python3.11/site-packages/ray/_private/"
    frames = [
        Frame("<module>", f"{ray}workers/default_worker.py", 300),
        Frame("main_loop", f"{ray}worker.py", 900),
        Frame("Judge.score", str(source), 3),
        Frame("wrapper", f"{ray}auto_init_hook.py", 21),
        Frame("get", f"{ray}worker.py", 2700),
    ]
    hung.stack(frames, process="ray::Judge.score", spans=[hung.span("reward", "score", 12, sample="1")])
    assert "waits for itself: ray.get in judge.py:3 score" in said(hung)


@pytest.mark.parametrize(("waiting", "who"), [(1, "task Task-0"), (3, "3 tasks")])
def test_a_loop_that_waits_for_tasks_is_told_with_their_place(hung: HungRun, waiting: int, who: str) -> None:
    python = "/env/lib/python3.11/asyncio/"
    loop = [
        Frame("main", "/home/u/train.py", 90),
        Frame("BaseEventLoop.run_until_complete", f"{python}base_events.py", 650),
        Frame("BaseEventLoop._run_once", f"{python}base_events.py", 1911),
        Frame("EpollSelector.select", "/env/lib/python3.11/selectors.py", 468),
    ]
    tool = [Frame("search", "/home/u/search.py", 12), Frame("Event.wait", f"{python}locks.py", 213)]
    group = [Frame("rollouts", "/home/u/train.py", 40), Frame("TaskGroup.__aexit__", f"{python}taskgroups.py", 110)]
    tasks = [Task(name=f"Task-{n}", frames=tool, waits_on="Future") for n in range(waiting)]
    main = Thread(name="MainThread", ident=1, main=True, frames=loop, spans=[0])
    hung.stack(
        [],
        threads=[main],
        tasks=[*tasks, Task(name="Task-9", frames=group, waits_on="Future")],
        rank=0,
        role="rollout",
        stage="generate",
    )
    assert said(hung) == f"rollout rank 0 waits for {who} in search.py:12 search in generate"


def asynchronous(source: Path, hung: HungRun, minutes: float) -> dict[str, Any]:
    """An actor whose loop is in a tool, while other tasks of it wait for answers."""
    python = "/env/lib/python3.11/"
    frames = [
        Frame("Thread.run", f"{python}threading.py", 982),
        Frame("search", str(source), 3),
        Frame("get", f"{python}site-packages/ray/_private/worker.py", 2700),
    ]
    here = Thread(name="AsyncIO Thread: default", ident=9, frames=frames, spans=[0])
    tasks = [
        Task(name="Task-1", frames=[Frame("call", "/env/lib/python3.11/site-packages/verl/tools.py", 8)], thread=9),
        *(Task(name=f"Task-{n}", frames=[Frame("generate", "/v/llm.py", 1)], waits_on="Future") for n in (2, 3)),
    ]
    return {"process": "ray::Agents", "threads": [here], "tasks": tasks}


def test_a_task_that_holds_up_its_loop_is_named(hung: HungRun, tmp_path: Path) -> None:
    tool = hung.span("tool", "search", 12, sample="63")
    turn = hung.span("turn", "generate", 12, sample="7")
    hung.stack(IDLE, spans=[tool, turn], **asynchronous(tmp_path / "tool.py", hung, 12))
    assert said(hung) == (
        "tool search of sample 63 blocks the event loop of ray::Agents (pid 1001 on n2), where 2 tasks wait; "
        "it is in tool.py:3 search"
    )


def test_a_loop_that_is_busy_for_a_moment_is_not(hung: HungRun, tmp_path: Path) -> None:
    tool = hung.span("tool", "search", 0.1, sample="63")
    hung.stack(IDLE, spans=[tool], **asynchronous(tmp_path / "tool.py", hung, 0.1))
    assert "blocks" not in finding_of(hung).text


def test_an_asynchronous_actor_that_waits_for_itself_is_named(hung: HungRun, tmp_path: Path) -> None:
    source = tmp_path / "tool.py"
    source.write_text("def search():\n    me = ray.get_runtime_context().current_actor\n    ray.get(me.x.remote())\n")
    hung.stack(IDLE, spans=[hung.span("tool", "search", 12, sample="63")], **asynchronous(source, hung, 12))
    assert "waits for itself: ray.get in tool.py:3 search" in said(hung)


def test_of_an_asynchronous_actor_the_thread_with_the_open_stage_tells(hung: HungRun) -> None:
    ray = "/env/lib/python3.11/site-packages/ray/_private/"
    main = [Frame("<module>", f"{ray}workers/default_worker.py", 300), Frame("main_loop", f"{ray}worker.py", 900)]
    threads = [Thread(name="AsyncIO Thread: default", ident=9, frames=list(REWARD), spans=[0])]
    hung.stack(main, rank=1, role="actor", stage="update_actor", threads=threads)
    found = finding_of(hung)
    assert "actor rank 1 is in reward.py:44 fetch_score" in found.text
    assert any("thread AsyncIO Thread: default" in line for line in found.evidence)


def test_a_single_process_is_told_by_where_it_is(hung: HungRun) -> None:
    hung.stack(REWARD, rank=0, role="trainer", stage="reward", process="python train.py")
    assert said(hung) == "trainer rank 0 is in reward.py:44 fetch_score in reward"


def test_without_stacks_the_open_spans_tell_and_autoprof_stacks_is_named(hung: HungRun) -> None:
    lines = [hung.line("tool", "search", "agent_loop", None, hung.began - n, 2.0) for n in range(1, 5)]
    hung.process(7, [*lines, hung.begun("tool", "search", "agent_loop", None, 11, ids={"sample": "63"})], host="n2")
    assert said(hung) == "sample 63 has waited 11 min 0 s in tool search"
    assert any(f"autoprof stacks {hung.folder.name} shows" in line for line in finding_of(hung).evidence)


def test_without_anything_else_the_open_stage_is_told(hung: HungRun) -> None:
    text = (hung.folder / "journal").glob("*.jsonl")
    path = next(iter(text))
    with path.open("a") as file:
        file.write(msgspec.json.encode(hung.begun("stage", "compute_rewards", "trainer", 0, 11)).decode() + "\n")
    assert said(hung).startswith("trainer has been in compute_rewards for 11 min")


@pytest.mark.parametrize(
    ("minutes", "running", "steps"), [(0.5, True, 3), (12, False, 3), (9, True, 1)], ids=["young", "ended", "first"]
)
def test_a_healthy_run_has_no_finding(tmp_path: Path, minutes: float, running: bool, steps: int) -> None:
    run = HungRun(tmp_path / "run", minutes, running, steps)
    figures = build.figures(runs.read(run.folder))
    assert [finding.text for finding in figures.findings] == []


def append(run: HungRun, *lines: Any) -> None:
    """Add lines to the timeline of the process that drives the steps."""
    (path,) = (run.folder / "journal").glob(f"{identity.HOST}-{os.getpid()}.jsonl")
    with path.open("ab") as file:
        file.writelines(msgspec.json.encode(line) + b"\n" for line in lines)


def sign_of_life(run: HungRun) -> MemoryLine:
    """Return the line that a watcher writes at least every 30 seconds."""
    return MemoryLine(run.now, MemoryState())


@pytest.mark.parametrize("minutes", [3, 12, 40])
def test_a_process_without_a_sign_of_life_in_a_stuck_step_did_not_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], minutes: float
) -> None:
    runs = [HungRun(tmp_path / name, minutes=minutes) for name in ("silent", "alive")]
    for run in runs:
        append(run, run.begun("stage", "rollout", "trainer", 0, minutes))
    append(runs[1], sign_of_life(runs[1]))
    said = [doctor(run, capsys)[1]["problems"][0].partition(": ")[2] for run in runs]
    assert said[0].startswith("trainer rank 0 did not answer for ")
    assert any("holds the interpreter's lock, and on Python 3.13" in line for line in finding_of(runs[0]).evidence)
    # Without a request of the watcher, the limit of the default settings has passed after 30 minutes.
    assert said[1].startswith("trainer rank 0 did not answer for " if minutes == 40 else "trainer has been in rollout")


def doctor(run: HungRun, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    """The exit status of `autoprof doctor`, and its report."""
    with mock.patch.dict(os.environ, AUTOPROF_LOOK_MS="200"), mock.patch.object(cli_hung, "_ANSWER_S", 0.1):
        status = main(["doctor", str(run.folder), "--json"])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("answers", [True, False])
def test_doctor_asks_the_processes_of_a_step_that_takes_far_longer_than_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mocker: Any, answers: bool
) -> None:
    run = HungRun(tmp_path / "run", minutes=3)
    append(run, run.begun("stage", "reward", "actor", 0, 3), sign_of_life(run))

    def answer(folder: str, asked: list[Any], wait_s: float) -> None:
        assert [each["pid"] for each in asked] == [os.getpid()]
        if answers:
            run.stack(REWARD, rank=0, role="actor", stage="reward", minutes=3)

    mocker.patch.object(cli_hung.nodes, "wait_for_answers", answer)
    (problem,) = doctor(run, capsys)[1]["problems"]
    place = "actor rank 0 is in reward.py:44 fetch_score" if answers else "actor has been in reward for 3 min"
    assert place in problem
    assert (run.folder / "hangs" / "step_000004").exists() is answers
    # The step was slow.
    append(run, run.line("step", "step", "trainer", 0, run.began, 181.0))
    assert [finding.kind for finding in build.figures(runs.read(run.folder)).findings] != ["hang"]


def test_a_stopped_process_is_a_problem_although_no_step_is_open(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = between(tmp_path, minutes=1, driver="rollout")
    with subprocess.Popen(["sleep", "600"]) as server:
        server.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, server.pid, os.WSTOPPED | os.WNOWAIT)
        run.process(server.pid, [], ticks=identity.start_ticks(server.pid) or 0)
        problems = doctor(run, capsys)[1]["problems"]
        server.kill()
    text = f"sleep 600 (pid {server.pid} on {identity.HOST}) is stopped, by a signal such as SIGSTOP or by a debugger"
    assert problems == [text]


def test_a_process_that_was_stopped_after_its_answer_is_named(tmp_path: Path) -> None:
    run = HungRun(tmp_path / "run")
    with subprocess.Popen(["sleep", "600"]) as engine:
        engine.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, engine.pid, os.WSTOPPED | os.WNOWAIT)
        run.process(engine.pid, [], ticks=identity.start_ticks(engine.pid) or 0)
        answer = msgspec.structs.replace(run.stack(REWARD), host=identity.HOST, pid=engine.pid)
        (run.hang / f"{identity.HOST}-{engine.pid}.json").write_bytes(msgspec.json.encode(answer))
        text = said(run)
        engine.kill()
    where = f"sleep 600 (pid {engine.pid} on {identity.HOST})"
    assert text == f"{where} is stopped, by a signal such as SIGSTOP or by a debugger"


def test_a_process_that_was_stopped_after_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = between(tmp_path, minutes=1)
    with subprocess.Popen(["sleep", "600"]) as actor:
        actor.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, actor.pid, os.WSTOPPED | os.WNOWAIT)
        end = {"kind": "exit", "unix_ns": run.now - MIN}
        run.process(actor.pid, [end], ticks=identity.start_ticks(actor.pid) or 0)
        (problem,) = doctor(run, capsys)[1]["problems"]
        actor.kill()
    assert " reported its end " in problem
    assert problem.endswith(" and is still running; a signal such as SIGSTOP or a debugger has stopped it")


def test_a_first_step_in_which_nothing_happens_is_stuck(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = HungRun(tmp_path / "run", minutes=12, steps=0)
    append(run, run.begun("stage", "rollout", "trainer", 0, 11), sign_of_life(run))
    status, report = doctor(run, capsys)
    (problem,) = report["problems"]
    assert re.fullmatch(
        r"step 1 has been stuck for 12 min \d+ s: trainer has been in rollout for 11 min \d+ s", problem
    )
    assert f"step 1: autoprof stacks {run.folder.name} shows where each process is" in report["notes"]
    assert re.fullmatch(r"none; step 1 has been open for 12 min \d+ s", report["facts"]["steps executed"])
    assert (status, report["verdict"]) == (1, "1 problem found")
    assert finding_of(run).text.partition(": ")[2] == problem.partition(": ")[2]


@pytest.mark.parametrize("kind", ["stage", "reward"])
def test_a_first_step_in_which_something_happens_is_not_stuck(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    run = HungRun(tmp_path / "run", minutes=25, steps=0)
    run.process(7, [run.line(kind, "score", "reward", 0, run.now - 9 * MIN, 60.0)], host="n2")
    status, report = doctor(run, capsys)
    assert (status, report["problems"], report["verdict"]) == (0, [], "no problems found")


def test_growing_memory_does_not_mean_that_something_happens(tmp_path: Path) -> None:
    run = HungRun(tmp_path / "run", minutes=12, steps=0)
    append(run, {"kind": "memory", "unix_ns": run.now - MIN, "memory": {"resident_bytes": 1}})
    assert finding_of(run).text.startswith("step 1 has been stuck for 12 min")


def between(
    folder: Path, minutes: float, took_s: float = 10.0, running: bool = True, driver: str = "trainer"
) -> HungRun:
    """A run whose fourth step ended so long ago, and that has begun no other one."""
    run = HungRun(folder / "run", minutes, running, driver=driver)
    append(run, run.line("step", "step", driver, 0, run.began - round(took_s * 1e9), took_s, step=4))
    drop = run.folder / "journal" / f"{identity.HOST}-{os.getpid()}.jsonl"
    lines = [line for line in drop.read_bytes().splitlines(keepends=True) if b'"begun"' not in line]
    drop.write_bytes(b"".join(lines))
    return run


@pytest.mark.parametrize(("moved_minutes", "stuck"), [(0.5, ""), (3, "step 4 has been stuck for 3 min")])
def test_a_batch_of_an_engine_is_stuck_if_the_engine_does_not_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], moved_minutes: float, stuck: str
) -> None:
    run = HungRun(tmp_path / "run", minutes=40, driver="rollout")
    append(run, MemoryLine(run.now - round(moved_minutes * MIN), MemoryState(), moved=True))
    append(run, sign_of_life(run))
    texts = doctor(run, capsys)[1]["problems"]
    assert [text[: len(stuck)] for text in texts] == ([stuck] if stuck else [])


def test_an_engine_without_requests_is_not_stuck(tmp_path: Path) -> None:
    run = between(tmp_path, minutes=40, driver="rollout")
    assert build.figures(runs.read(run.folder)).findings == []


def change(run: HungRun, **fields: Any) -> None:
    """Change fields of `run.json`."""
    path = run.folder / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def switch_off(run: HungRun) -> None:
    (run.folder / "control").mkdir()
    (run.folder / "control" / "off").touch()


def moved(run: HungRun, pid: int, host: str = identity.HOST) -> None:
    """Make another process the driver of the steps."""
    (path,) = (run.folder / "journal").glob("*.jsonl")
    path.rename(path.with_name(f"{host}-{pid}.jsonl"))


NO_STEP = r"no step has begun for 12 min \d+ s since step 4 ended; "


def test_a_run_that_begins_no_further_step_is_named_with_its_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = between(tmp_path, 12)
    status, report = doctor(run, capsys)
    (problem,) = report["problems"]
    assert re.fullmatch(rf"{NO_STEP}process trainer \(pid {os.getpid()}\) is alive", problem)
    assert f"the run: autoprof stacks {run.folder.name} shows where each process is" in report["notes"]
    assert "the run: the median step took 10.0 s" in report["notes"]
    assert (status, report["verdict"]) == (1, "1 problem found")
    assert re.fullmatch(NO_STEP + ".* is alive", finding_of(run).text)


@pytest.mark.parametrize(
    ("pid", "host", "state"),
    [(9_000_001, identity.HOST, "gone"), (7, "n2", "on n2; from this host autoprof can't see if it is alive")],
)
def test_a_process_that_may_be_gone_between_steps_is_named(tmp_path: Path, pid: int, host: str, state: str) -> None:
    run = between(tmp_path, 12)
    moved(run, pid, host)
    assert re.fullmatch(rf"{NO_STEP}process trainer \(pid {pid}\) is {state}", finding_of(run).text)


@pytest.mark.parametrize("minutes", [5, 12])
def test_a_resumed_run_that_begins_no_step_is_stuck_since_it_was_resumed(tmp_path: Path, minutes: int) -> None:
    run = between(tmp_path, 600)
    moved(run, 9_000_001)
    change(run, started=run.now / 1e9 - 60 * minutes)
    found = [finding.text for finding in build.figures(runs.read(run.folder)).findings]
    said = r"no step has begun for 12 min \d+ s since the run was resumed"
    assert [bool(re.fullmatch(said, text)) for text in found] == ([True] if minutes == 12 else [])


@pytest.mark.parametrize(
    ("minutes", "happened"),
    [
        (12, lambda run: (append(run, {"kind": "exit", "unix_ns": run.now - 11 * MIN}), moved(run, 9_000_001))),
        (12, switch_off),
        (40, lambda run: append(run, run.line("stage", "validate", "trainer", 0, run.now - 20 * MIN, 660, step=None))),
        # It may still execute the steps.
        (1, lambda run: change(run, settings={"steps": "100"})),
    ],
    ids=["the trainer has exited", "switched off", "a stage after the last step", "steps to come"],
)
def test_no_step_is_missed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], minutes: float, happened: Callable[[HungRun], None]
) -> None:
    run = between(tmp_path, minutes)
    happened(run)
    status, report = doctor(run, capsys)
    assert (status, report["problems"]) == (0, [])


@pytest.mark.parametrize(
    ("minutes", "took_s", "running"),
    [(9, 10.0, True), (14, 180.0, True), (-30, 10.0, True), (12, 10.0, False)],
    ids=["young", "slow steps", "clock of another host", "ended"],
)
def test_a_healthy_run_misses_no_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], minutes: float, took_s: float, running: bool
) -> None:
    run = between(tmp_path, minutes, running=running)
    for step in range(1, 5):
        append(run, run.line("step", "step", "trainer", 0, run.began - round(took_s * 1e9), took_s, step=step))
    status, report = doctor(run, capsys)
    assert (status, report["problems"]) == (0, [])


@pytest.mark.parametrize(("minutes", "status"), [(2, 0), (12, 1)])
def test_a_run_that_has_begun_no_step_says_for_how_long(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], minutes: float, status: int
) -> None:
    run = HungRun(tmp_path / "run", steps=0)
    (path,) = (run.folder / "journal").glob("*.jsonl")
    path.unlink()
    change(run, started=run.now / 1e9 - 60 * minutes)
    found, report = doctor(run, capsys)
    (line,) = report["problems" if status else "notes"]
    said = r"since the run started: no hook fired; --all lists the hooks"
    assert re.fullmatch(rf"no step has begun for (\d+ s|{minutes} min \d+ s) {said}", line)
    assert (found, bool(report["problems"])) == (status, bool(status))


def test_a_run_that_was_killed_in_its_first_step_saw_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = HungRun(tmp_path / "run", steps=0, running=False)
    change(run, state="running", pid=9_000_001)
    moved(run, 9_000_001)
    status, report = doctor(run, capsys)
    assert (status, [line for line in report["problems"] if "step was seen" in line or "stuck" in line]) == (1, [])
    assert report["problems"][0].startswith("the trainer vanished in step 1 (killed by a signal")
    assert report["facts"]["steps executed"] == "none; step 1 was open for an unknown time"


def test_a_step_that_stood_and_ended_is_told_as_over(tmp_path: Path) -> None:
    run = HungRun(tmp_path / "run", running=False)
    run.stack(REWARD, rank=0, role="trainer", stage="reward", process="python train.py")
    assert re.fullmatch(r"step 4 was stuck for .*: .* was in reward.py:44 fetch_score.*", finding_of(run).text)


def test_all_verbs_about_a_step_that_is_over_are_in_the_past(tmp_path: Path) -> None:
    run = HungRun(tmp_path / "run", running=False)
    run.stack(ALL_REDUCE, rank=0, role="actor", stage="update_actor", record=flight_record([join(5)], 2))
    run.stack(REWARD, rank=1, role="actor", record=flight_record([join(4, True)], 2))
    finding = finding_of(run)
    assert finding.text.endswith(
        "actor rank 1 had not joined all_reduce #5 in update_actor; it was in reward.py:44 fetch_score"
    )
    assert finding.evidence[0].startswith("actor rank 0 waited in all_reduce #5")


def test_an_idle_worker_that_was_forked_is_not_in_a_function_of_its_parent() -> None:
    library = "/usr/lib/python3.11/multiprocessing"
    frames = [
        Frame("fetch_score", "/data/train.py", 13),
        Frame("BaseProcess._bootstrap", f"{library}/process.py", 314),
        Frame("Connection._recv", f"{library}/connection.py", 395),
    ]
    frame = places.best_frame(frames)
    assert frame is not None
    assert frame.function == "Connection._recv"


def test_a_step_of_which_no_process_tells_stands_while_it_has_not_ended(tmp_path: Path) -> None:
    run = HungRun(tmp_path / "run")
    next(iter((run.folder / "journal").iterdir())).unlink()
    run.process(os.getpid(), [])
    run.stack(IDLE, process="ray::AgentLoopWorker", spans=[run.span("tool", "search", 12, sample="63")])
    (run.hang / "why.json").unlink()
    assert said(run).startswith("sample 63 has waited 12 min 0 s in tool search")


def test_a_process_of_an_engine_is_named_by_its_title(hung: HungRun) -> None:
    for title in ("sglang::scheduler_TP0", "sglang::scheduler_TP1"):
        frames = REWARD if title.endswith("1") else ALL_REDUCE
        hung.stack(frames, rank=int(title[-1]), process=title, record=flight_record([join(1)]))
    assert said(hung).startswith("sglang::scheduler_TP1 (pid 1002 on n2) is in reward.py:44 fetch_score")


@pytest.mark.parametrize("is_over", [False, True])
def test_a_hang_that_was_over_is_no_cause_of_a_death(tmp_path: Path, is_over: bool) -> None:
    run = HungRun(tmp_path / "run")
    stuck = run.stack(REWARD, rank=0, role="actor", stage="reward")
    path = run.hang / f"n2-{stuck.pid}.json"
    survivor = msgspec.structs.replace(stuck, host=identity.HOST, pid=os.getpid())
    path.write_bytes(msgspec.json.encode(survivor))
    starter = 2**22 + 1
    ended = [run.line("step", "step", "trainer", 0, run.began, 900.0, step=4)] if is_over else []
    run.process(starter, [run.begun("step", "step", "trainer", 0, 12, step=4), *ended], ticks=1)
    change(run, pid=starter, ticks=1)
    sentence = causes.first_sentence(runs.read(run.folder))
    assert sentence.startswith("the process that started the run vanished" if is_over else "step 4 has been stuck")


def test_a_child_process_that_was_stopped_in_a_step_that_has_ended(tmp_path: Path) -> None:
    run = HungRun(tmp_path / "run")
    made = run.stack(IDLE, process="python -m sglang.launch_server", role="rollout", stage="generate")
    text = "process sglang::scheduler (pid 7) is stopped, by a signal such as SIGSTOP or by a debugger"
    failed = msgspec.structs.replace(made, failed=[text])
    (run.hang / f"n2-{made.pid}.json").write_bytes(msgspec.json.encode(failed))
    append(run, run.line("step", "step", "trainer", 0, run.began, 900.0))
    (finding,) = [each for each in build.figures(runs.read(run.folder)).findings if each.kind == "hang"]
    assert (
        "process sglang::scheduler (pid 7) was stopped, by a signal such as SIGSTOP or by a debugger; " in finding.text
    )


@pytest.mark.parametrize("folder", ["/env/lib/python3.11/site-packages/openrlhf/utils", "/home/u/openrlhf/utils"])
def test_a_reward_of_a_trainer_names_the_thread_that_runs_the_users_function(hung: HungRun, folder: str) -> None:
    library = [Frame("_fetch_rewards", f"{folder}/agent.py", 325)]
    hung.stack(
        IDLE,
        process="ray::RolloutRayActor",
        spans=[hung.span("reward", "compute_reward", 12, role="reward")],
        threads=[Thread(name=f"uvloop_{number}", ident=number + 2, frames=[*REWARD]) for number in range(2)],
        tasks=[Task(name="Task-1", frames=library, spans=[0], waits_on="1 of 1 gathered: Task-2")],
    )
    assert said(hung) == (
        "ray::RolloutRayActor (pid 1001 on n2) has waited 12 min 0 s in reward compute_reward; "
        "it is in agent.py:325 _fetch_rewards; its 2 other threads are in reward.py:44 fetch_score"
    )


@pytest.mark.parametrize("late_s", [5, 31])
def test_a_process_that_answered_late_in_a_step_that_has_ended(tmp_path: Path, late_s: int) -> None:
    run = HungRun(tmp_path / "run")
    run.stack(REWARD, rank=0, role="actor", stage="update_weights")
    made = run.stack(IDLE, process="ray::vLLMHttpServer")
    late = msgspec.structs.replace(made, unix_ns=run.now + late_s * 1_000_000_000)
    (run.hang / f"n2-{made.pid}.json").write_bytes(msgspec.json.encode(late))
    unhooked = msgspec.structs.replace(late, pid=7, by=BY_PY_SPY_OF_ACTOR)
    (run.hang / "n2-7.json").write_bytes(msgspec.json.encode(unhooked))
    append(run, run.line("step", "step", "trainer", 0, run.began, 900.0))
    (finding,) = [each for each in build.figures(runs.read(run.folder)).findings if each.kind == "hang"]
    assert "pid 7 " not in " ".join([finding.text, *finding.evidence])
    place = "ray::vLLMHttpServer (pid 1002 on n2) did not answer for 31.0 s"
    assert (f": {place}" in finding.text) is (late_s == 31)


@pytest.mark.parametrize("with_stacks", [True, False])
@pytest.mark.parametrize(("ended_in", "is_named"), [(4, True), (3, True), (2, False)])
def test_a_rank_that_vanished_in_a_stuck_step_is_named(
    tmp_path: Path, with_stacks: bool, ended_in: int, is_named: bool
) -> None:
    run = HungRun(tmp_path / "run")
    ended = run.line("stage", "update_weights", "actor", 0, run.began, 2.0, step=ended_in)
    run.process(2**22 + 1, [ended], ticks=1)
    if with_stacks:
        run.stack(IDLE, process="ray::AgentLoopWorker", spans=[run.span("turn", "generate", 12, sample="63")])
    text = f"actor rank 0 vanished after update_weights of step {ended_in} (killed by a signal, or ended by os._exit)"
    assert (said(run) == text) is is_named


def test_doctor_says_it_as_a_problem(hung: HungRun, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(3):
        hung.stack(REWARD if rank == 2 else ALL_REDUCE, rank=rank, role="actor", stage="update_actor")
    assert main(["doctor", str(hung.folder)]) == 1
    output = " ".join(capsys.readouterr().out.split())
    assert "actor rank 2 is in reward.py:44 fetch_score, 2 others in a collective" in output


@pytest.mark.parametrize("seed", range(12))
def test_damaged_files_never_raise(hung: HungRun, seed: int) -> None:
    spans = [hung.span("tool", "search", 11, sample="63")]
    for rank in range(3):
        content = flight_record([join(4, True), join(5)], 3)
        hung.stack(ALL_REDUCE, rank=rank, role="actor", stage="update_actor", spans=spans, record=content)
    chance = random.Random(seed)
    for path in sorted(hung.hang.iterdir()):
        if path.suffix == ".fr" and seed % 4:
            path.unlink()
            continue
        content = bytearray(path.read_bytes())
        for _ in range(chance.choice((0, 1, 3, 30))):
            content[chance.randrange(len(content))] = chance.randrange(256)
        path.write_bytes(content[: chance.choice((len(content), len(content), chance.randrange(len(content))))])
    (hung.hang / "n9-1.json").write_text('{"host": 3, "threads": [1, {"frames": [{"line": "x"}]}], "spans": {}}')
    (hung.hang / "n9-2.json").write_text("[" * 5000)
    assert list(hang_state.read_hangs(hung.folder))
    assert build.figures(runs.read(hung.folder)).findings


def test_a_finding_of_no_step_is_listed_with_those_of_the_costliest_steps() -> None:
    made = [Finding(kind="failed_samples", text=f"{n}", evidence=[], seconds=n, step=n or None) for n in range(6)]
    assert [finding.step for finding in findings.abridged(made)] == [5, 4, 3, None]


def test_each_step_that_stood_is_told(tmp_path: Path) -> None:
    made = [Finding(kind="hang", text=f"step {n} stood", evidence=[], seconds=n, step=n) for n in range(9)]
    assert [finding.step for finding in findings.abridged(made)] == list(range(8, -1, -1))
