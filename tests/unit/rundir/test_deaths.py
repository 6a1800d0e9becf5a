"""Deaths in generated runs: causes come before consequences, and normal ends are not listed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from autoprof.base.identity import HOST, machine
from autoprof.rundir import deaths, memory_state, runs
from autoprof.rundir.records import Death
from autoprof.rundir.runs import Run

# No process has these pids: pid_max is at most 2 ** 22.
DRIVER, TRAINER, ACTOR, OTHER = 9_000_001, 9_000_002, 9_000_003, 9_000_004
MS = 1_000_000
START = 1_795_200_000_000_000_000


class Made:
    """A run directory, written line by line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "journal").mkdir(parents=True)

    def info(self, state: str, status: int | None = None, **more: Any) -> Run:
        known = {"id": self.path.name, "started": 1795200000.0, "state": state, "host": HOST, "pid": DRIVER, "ticks": 5}
        (self.path / "run.json").write_text(json.dumps(known | {"hosts": [HOST]} | more))
        if status is not None:
            (self.path / "exit_status").write_bytes(bytes([status]))
        return runs.read(self.path)

    def process(
        self, pid: int, *lines: dict[str, Any], host: str = HOST, ticks: int = 7, stderr: str = "", **memory: Any
    ) -> None:
        first = {"kind": "process", "host": host, "pid": pid, "clock": {"unix_ns": START}, "version": "0"}
        first |= {"ticks": ticks, "boot": machine(), "memory": memory, "stderr": stderr}
        content = b"".join(msgspec.json.encode(line) + b"\n" for line in (first, *lines))
        (self.path / "journal" / f"{host}-{pid}.jsonl").write_bytes(content)

    def crash(self, pid: int, text: str, host: str = HOST) -> Path:
        (self.path / "crashes").mkdir(exist_ok=True)
        path = self.path / "crashes" / f"{host}-{pid}.txt"
        path.write_text(text)
        return path

    def kill(self, pid: int, at: int, line: int, host: str = HOST) -> None:
        text = f'Stack (most recent call first):\n  File "/home/u/reward.py", line {line} in fetch_score\n'
        for path in (self.crash(pid, text, host), self.path / "journal" / f"{host}-{pid}.jsonl"):
            os.utime(path, ns=(START + at * MS, START + at * MS))


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path / "run")


def begun(name: str, at: int, role: str = "actor", rank: int | None = 1, span: str = "stage", step: int = 143) -> dict:
    who = {"step": step, "role": role, "rank": rank}
    return {"kind": "begun", "span": span, "name": name, "start_ns": START + at * MS} | who


def span(name: str, at: int, end: int, kind: str = "stage", error: str | None = None, step: int = 143) -> dict:
    who = {"step": step, "role": "trainer", "rank": 0}
    times = {"start_ns": START + at * MS, "end_ns": START + end * MS}
    return {"kind": kind, "name": name} | who | times | ({"error": error} if error else {})


def raised(kind: str, at: int, name: str = "reward", role: str = "trainer", message: str = "no", **more: Any) -> dict:
    frames = [{"function": "fetch_score", "file": "/home/u/reward.py", "line": 44}]
    frames.append({"function": "get", "file": "/x/site-packages/requests/api.py", "line": 73})
    exception = {"type": kind, "message": message, "frames": frames} | more
    who = {"step": 3, "role": role, "rank": 0}
    return (
        {"kind": "raised", "unix_ns": START + at * MS, "span": "stage", "name": name} | who | {"exception": exception}
    )


def text(found: list[Death]) -> str:
    return deaths.sentence(found[0])


@pytest.mark.parametrize(("message", "status"), [("0", 0), ("", 0), ("3", 3), ("no data", 1)])
@pytest.mark.parametrize("over", [False, True])
def test_a_rank_that_left_comes_before_those_that_lost_it(made: Made, message: str, status: int, over: bool) -> None:
    left = raised("SystemExit", 20, "generate", "rollout", message)
    lost = raised("RuntimeError", 30, "update_actor", "actor", "[gloo] Connection closed by peer")
    for pid, line, error in ((71, lost, "RuntimeError"), (72, left, "")):
        end = {"kind": "exit", "unix_ns": START + 40 * MS, "error": error, "exception": line["exception"]}
        made.process(pid, line, span(line["name"], 10, 31, error="E"), end if error else end | {"exception": None})
    named = [{"pid": 72, "rank": 1, "status": status or None}]
    failed = {"type": "ChildFailedError", "message": "train.py FAILED", "frames": [], "named": named}
    run = made.info("failed", 1, exception=failed)
    found = deaths.find_in_run(run) if over else deaths.find(made.path, run.info, run.processes, run_has_ended=False)
    assert (
        text(found) == f"rollout rank 0 exited with status {status} in reward.py:44 fetch_score, in generate of step 3"
    )
    assert sorted(death.pid for death in found) == [71, 72, DRIVER]


@pytest.mark.parametrize(
    ("done_ms", "first"),
    [(25, "actor rank 1 ended before"), (35, "actor rank 1 ended before"), (9000, "actor rank 0 failed")],
)
def test_a_rank_that_ended_well_comes_before_one_that_lost_it(made: Made, done_ms: int, first: str) -> None:
    lost = raised("RuntimeError", 30, "update_actor", "actor", "[gloo] Connection closed by peer")
    lost_end = {"kind": "exit", "unix_ns": START + 31 * MS, "error": "RuntimeError", "exception": lost["exception"]}
    made.process(71, lost, span("update_actor", 10, 31, error="RuntimeError"), lost_end)
    last = span("update_actor", 10, 20) | {"role": "actor", "rank": 1, "step": 2}
    made.process(72, last, {"kind": "exit", "unix_ns": START + done_ms * MS, "error": ""})
    found = deaths.find_in_run(made.info("failed", 1))
    assert text(found).startswith(first)
    ended = "actor rank 1 ended before the other ranks, without an error, after update_actor of step 2"
    assert done_ms > 1000 or text(found) == ended


@pytest.mark.parametrize(("lost_in", "first"), [(2, "Ray actor Scorer (pid 72) vanished"), (1, "actor rank 0 failed")])
def test_an_actor_that_samples_lost_comes_before_the_trainer_that_misses_them(
    made: Made, lost_in: int, first: str
) -> None:
    named = [{"pid": 72, "name": "Ray actor Scorer"}]
    lost = raised("ActorDiedError", 20, "compute_score", "agent_loop", "died", named=named)
    failed = raised("RuntimeError", 30, "update_actor", "actor", "no samples")
    made.process(71, lost | {"span": "reward", "step": lost_in})
    made.process(72)
    end = {"kind": "exit", "unix_ns": START + 31 * MS, "error": "RuntimeError", "exception": failed["exception"]}
    made.process(73, failed, span("update_actor", 10, 31, error="RuntimeError"), end)
    found = deaths.find_in_run(made.info("failed", 1))
    assert text(found).startswith(first)
    assert len(found) == lost_in


ENGINE = {"kind": "raised", "unix_ns": START + 20 * MS, "span": "engine", "role": "rollout"} | {
    "name": "vLLM's EngineCore"
}
KILLED = {"type": "EngineDeadError", "message": "4 requests failed"}
KILLED |= {"named": [{"pid": 72, "name": "vLLM's EngineCore", "signal": "SIGKILL"}]}
BUG = {"type": "KeyError", "message": "'a'", "frames": [{"function": "run", "file": "/home/u/core.py", "line": 4}]}


@pytest.mark.parametrize(
    ("pid", "error", "first", "more"),
    [
        (71, KILLED, "was killed by SIGKILL in step 3", "then: EngineDeadError: 4 requests failed"),
        (72, BUG, "failed with KeyError: 'a' in core.py:4 run, in step 3", "at /home/u/core.py:4 run"),
    ],
)
def test_an_engine_that_died_is_named_although_the_server_ended_with_status_0(
    made: Made, pid: int, error: dict[str, Any], first: str, more: str
) -> None:
    line = ENGINE | {"step": 3, "rank": None, "exception": error}
    for each in (71, 72):
        made.process(each, *([line] if each == pid else []))
    found = deaths.find_in_run(made.info("ended", 0, pid=71))
    assert text(found) == f"vLLM's EngineCore (pid 72) {first}"
    assert more in deaths.evidence(found)


@pytest.mark.parametrize(("trained_ms", "role", "count"), [(19, "trainer", 0), (21, "trainer", 1), (19, "rollout", 1)])
def test_an_engine_that_is_killed_after_the_last_step_of_the_trainer_is_no_death(
    made: Made, trained_ms: int, role: str, count: int
) -> None:
    made.process(70, span("step", 10, trained_ms, kind="step") | {"role": role})
    made.process(71, ENGINE | {"step": None, "rank": None, "exception": KILLED})
    made.process(72)
    assert len(deaths.find_in_run(made.info("ended", 0, pid=70))) == count


@pytest.mark.parametrize("server", [70, 73])
def test_the_exception_of_an_engine_counts_more_than_its_exit_status(made: Made, server: int) -> None:
    exited = KILLED | {"named": [{"pid": 72, "name": "vLLM's EngineCore", "status": 1}]}
    made.process(server, ENGINE | {"step": 3, "rank": None, "exception": exited})
    made.process(72, ENGINE | {"step": None, "rank": None, "exception": BUG})
    (found,) = deaths.find_in_run(made.info("ended", 0, pid=server))
    assert deaths.sentence(found) == "vLLM's EngineCore (pid 72) failed with KeyError: 'a' in core.py:4 run, in step 3"


def test_a_killed_worker_comes_before_the_engine_that_lost_it(made: Made) -> None:
    worker = {"type": "vLLM", "named": [{"pid": 74, "name": "vLLM's VllmWorker-1", "signal": "SIGKILL"}]}
    exited = KILLED | {"named": [{"pid": 72, "name": "vLLM's EngineCore", "status": 1}]}
    failed = {"type": "RuntimeError", "message": "Executor failed."}
    lines = [ENGINE | {"step": None, "rank": None, "exception": each} for each in (worker, failed)]
    made.process(71, ENGINE | {"step": 3, "rank": None, "exception": exited})
    made.process(72, *lines)
    made.process(74)
    found = deaths.find_in_run(made.info("ended", 0, pid=71))
    assert [deaths.sentence(death) for death in found] == [
        "vLLM's VllmWorker-1 (pid 74) was killed by SIGKILL",
        "vLLM's EngineCore (pid 72) failed with RuntimeError: Executor failed., in step 3",
    ]


@pytest.mark.parametrize(
    ("pid", "error", "first"),
    [
        (71, {"signal": "SIGKILL"}, "was killed by SIGKILL in step 3"),
        (71, {"status": 1}, "exited with status 1 in step 3"),
        (72, BUG, "failed with KeyError: 'a' in core.py:4 run, in step 3"),
    ],
)
def test_an_engine_whose_server_then_killed_itself_comes_first(
    made: Made, pid: int, error: dict[str, Any], first: str
) -> None:
    name = "SGLang's scheduler_0"
    exception = error if "type" in error else {"type": "SGLang", "named": [error | {"pid": 72, "name": name}]}
    line = ENGINE | {"name": name, "step": 3, "rank": None, "exception": exception}
    for each in (71, 72):
        made.process(
            each,
            *([begun("step", 10, "rollout", None, "step", 3)] if each == 71 else []),
            *([line] if each == pid else []),
        )
    engine, server = deaths.find_in_run(made.info("running", pid=71))
    assert deaths.sentence(engine) == f"{name} (pid 72) {first}"
    assert deaths.sentence(server).startswith("the process that started the run vanished in step 3")


def test_a_process_with_nothing_open_that_is_gone_is_none(made: Made) -> None:
    made.process(ACTOR, begun("update_actor", 5), span("update_actor", 5, 9))
    assert deaths.find_in_run(made.info("running", pid=os.getpid(), ticks=0)) == []
    assert deaths.find_in_run(made.info("ended", 0)) == []


def test_in_a_run_that_goes_on_a_worker_that_is_gone_in_a_stage_is_told(made: Made) -> None:
    made.process(ACTOR, begun("update_actor", 5))
    run = made.info("running", pid=os.getpid(), ticks=0)
    sentence = "actor rank 1 vanished in update_actor of step 143 (killed by a signal, or ended by os._exit)"
    assert text(deaths.find_in_run(run)) == sentence


def test_between_two_stages_the_one_before_is_told(made: Made) -> None:
    made.process(ACTOR, begun("log_prob", 5), span("log_prob", 5, 9) | {"role": "actor", "rank": 1})
    named = {"type": "ActorDiedError", "message": "The actor died unexpectedly", "named": [{"pid": ACTOR}]}
    found = deaths.find_in_run(made.info("failed", 1, exception=named, ended=1795200001.0))
    sentence = "actor rank 1 vanished after log_prob of step 143 (killed by a signal, or ended by os._exit)"
    assert text(found) == sentence


def test_a_handler_that_tells_no_python_is_known_by_its_words(made: Made, tmp_path: Path) -> None:
    log = tmp_path / "worker.err"
    log.write_text('begin\n!!!!!!! Segfault encountered !!!!!!!\n  File "x/strlen.S", line 79, in __strlen_evex\n')
    made.process(TRAINER, begun("compute_advantage", 5, role="trainer", rank=0, step=2), stderr=str(log))
    found = deaths.find_in_run(made.info("running", pid=os.getpid(), ticks=0))
    assert text(found) == "the trainer crashed (SIGSEGV) in compute_advantage of step 2"
    assert found[0].file == str(log)


def test_what_was_open_when_a_run_ended_well_is_no_death(made: Made) -> None:
    made.process(ACTOR, begun("update_actor", 5))
    assert deaths.find_in_run(made.info("ended", 0)) == []
    assert deaths.find_in_run(made.info("failed", error="SIGINT")) == []


def test_another_hosts_process_is_not_judged(made: Made) -> None:
    made.process(ACTOR, begun("update_actor", 5), host="elsewhere")
    assert deaths.find_in_run(made.info("running", pid=os.getpid(), ticks=0)) == []


def kernel(folder: Path, kills: int) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "memory.events").write_text(f"oom_kill {kills}\n")
    (folder / "memory.peak").write_text(f"{61_800_000_000}\n")
    return str(folder)


GROUP = {"used_bytes": 50_000_000_000, "limit_bytes": 62_000_000_000}


@pytest.mark.parametrize(("state", "status"), [("running", None), ("ended", 0)])
def test_a_process_that_the_kernel_killed_for_memory(
    made: Made, tmp_path: Path, state: str, status: int | None
) -> None:
    group = kernel(tmp_path / "group", kills=3)
    made.process(ACTOR, begun("update_actor", 5), cgroup=group, kills=2, **GROUP)
    made.process(OTHER, begun("update_actor", 4, rank=0), cgroup="", **GROUP)
    died = [] if state == "running" else [as_noted(made)]
    (first, *_) = found = deaths.find_in_run(
        made.info(state, status, died=died, pid=os.getpid() if not died else DRIVER, ticks=0)
    )
    killed = "actor rank 1 was killed by the kernel (out of memory: 61.80 GB of 62.00 GB used)"
    assert text(found) == f"{killed} in update_actor of step 143"
    assert deaths.sentence(first, hosts=2).startswith(f"actor rank 1 on {HOST} was killed")


def as_noted(made: Made) -> dict[str, Any]:
    """Return the death of the actor as the process that started the run writes it at its end."""
    run = made.info("running")
    noted = [
        death for death in deaths.find(made.path, run.info, run.processes, run_has_ended=False) if death.pid == ACTOR
    ]
    return msgspec.to_builtins(noted[0])


def test_nobody_is_blamed_for_an_earlier_kill(made: Made, tmp_path: Path) -> None:
    made.process(ACTOR, begun("update_actor", 5), cgroup=kernel(tmp_path / "group", kills=2), kills=2, **GROUP)
    (found,) = deaths.find_in_run(made.info("running", pid=os.getpid(), ticks=0))
    assert found.how == deaths.GONE_DEAD


def test_a_line_of_another_process_tells_of_a_kill_when_the_group_is_gone(made: Made) -> None:
    memory = {"kind": "memory", "unix_ns": START + 6 * MS, "memory": {"kills": 1, "cgroup": "/gone"} | GROUP}
    made.process(ACTOR, begun("update_actor", 5), memory, cgroup="/gone", **GROUP)
    (found,) = deaths.find_in_run(made.info("running", pid=os.getpid(), ticks=0))
    assert (found.how, found.killer) == (deaths.KILLED, deaths.KERNEL)


def test_a_driver_that_was_killed_comes_before_its_workers(made: Made) -> None:
    """The step and stage come from the trainer's process, which Ray has killed."""
    made.process(TRAINER, begun("step", 1, "trainer", 0, "step"), begun("update_actor", 2, "trainer", 0))
    made.process(ACTOR, begun("update_actor", 3))
    found = deaths.find_in_run(made.info("running"))
    assert [death.pid for death in found] == [DRIVER, TRAINER, ACTOR]
    assert text(found).startswith("the process that started the run vanished in update_actor of step 143 (killed")


def test_a_starter_with_own_stages_has_no_place_of_another_process(made: Made) -> None:
    """A process that multiprocessing forked ends without an exit line."""
    made.process(DRIVER, begun("log_prob", 1), span("log_prob", 1, 2) | {"role": "actor", "rank": 0})
    made.process(ACTOR, begun("update_actor", 3))
    found = deaths.find_in_run(made.info("running"))
    (starter,) = [death for death in found if death.pid == DRIVER]
    assert (starter.started, starter.step, starter.stage) == (True, None, "")


def test_a_worker_that_crashed_comes_before_the_driver(made: Made) -> None:
    made.process(ACTOR, begun("update_actor", 3))
    made.crash(OTHER, "")
    made.crash(
        ACTOR,
        "Fatal Python error: Aborted\n\nThread 0x01 (most recent call first):\n  <no Python frame>\n\n"
        'Thread 0x02 (most recent call first):\n  File "/x/site-packages/torch/nn.py", line 5 in forward\n'
        '  File "/home/u/actor.py", line 12 in f\n  File "/x/autoprof/hooks/dispatch.py", line 30 in drive\n',
    )
    found = deaths.find_in_run(made.info("running"))
    assert text(found) == "actor rank 1 crashed (SIGABRT) in update_actor of step 143: actor.py:12 f"
    assert [frame.function for frame in found[0].frames] == ["f", "forward"]
    assert [death.pid for death in found] == [ACTOR, DRIVER]


def test_a_crash_before_a_process_began_is_of_another_process_with_its_pid(made: Made) -> None:
    made.process(ACTOR, begun("update_actor", 3))
    os.utime(made.crash(ACTOR, "Fatal Python error: Aborted\n"), ns=(START - MS, START - MS))
    earlier = [{"host": HOST, "pid": ACTOR, "started": START / 1e9 - 60, "state": "unfinished"}]
    (found,) = deaths.find_in_run(made.info("ended", 0, earlier=earlier))
    assert text([found]) == f"in an earlier attempt, process {ACTOR} crashed (SIGABRT)"


@pytest.mark.parametrize(
    "own", ["capture/profilers/foreign.py", "hooks/wrapper.py", "behaviours/ray.py", "__init__.py"]
)
def test_a_crash_is_not_placed_in_a_file_of_autoprof(made: Made, own: str) -> None:
    made.process(ACTOR, begun("update_actor", 3))
    made.crash(
        ACTOR,
        "Fatal Python error: Segmentation fault\n\nCurrent thread 0x01 (most recent call first):\n"
        f'  File "/src/autoprof/autoprof/{own}", line 119 in watched\n'
        '  File "/x/site-packages/torch/autograd/profiler.py", line 400 in _prepare_trace\n'
        '  File "/home/u/autoprof/train.py", line 12 in fit\n',
    )
    found = deaths.find_in_run(made.info("running"))
    assert text(found) == "actor rank 1 crashed (SIGSEGV) in update_actor of step 143: train.py:12 fit"
    assert [frame.function for frame in found[0].frames] == ["fit", "_prepare_trace"]


def test_a_crash_in_functions_of_autoprof_alone_shows_them(made: Made) -> None:
    made.process(ACTOR, begun("update_actor", 3))
    made.crash(
        ACTOR,
        "Fatal Python error: Aborted\n\nCurrent thread 0x01 (most recent call first):\n"
        '  File "/x/autoprof/capture/writer.py", line 9 in write\n',
    )
    assert [frame.function for frame in deaths.find_in_run(made.info("running"))[0].frames] == ["write"]


def test_an_exception_that_the_driver_swallowed_is_told_from_the_trainers_process(made: Made) -> None:
    """hydra prints an exception and calls sys.exit(1)."""
    made.process(
        TRAINER,
        raised("ValueError", 5, name="step") | {"span": "step"},
        span("reward", 4, 5, "timer", "ValueError"),
        span("step", 1, 6, "step", "ValueError"),
    )
    found = deaths.find_in_run(made.info("ended", 1))
    assert text(found) == "the trainer failed with ValueError: no in reward.py:44 fetch_score, in reward of step 3"


def test_an_exception_that_somebody_caught_is_none(made: Made) -> None:
    made.process(TRAINER, raised("ValueError", 5), span("reward", 4, 5, error="ValueError"), span("step", 1, 6, "step"))
    (found,) = deaths.find_in_run(made.info("ended", 1))
    assert (found.how, found.status) == (deaths.EXIT, 1)
    assert deaths.sentence(found) == "the process that started the run exited with status 1"


def test_the_first_of_several_exceptions_is_the_cause_and_the_same_one_is_told_once(made: Made) -> None:
    made.process(ACTOR, raised("KeyError", 5, "update_actor", "actor"))
    made.process(TRAINER, raised("KeyError", 8, "update_actor"))
    made.process(OTHER, raised("RuntimeError", 3, "x", "actor", "Connection closed by peer"))
    found = deaths.find_in_run(made.info("failed", 1, error="KeyError"))
    assert [death.pid for death in found] == [OTHER, ACTOR]
    # If a process vanished, an exception about a lost connection is a consequence.
    made.process(OTHER + 1, begun("update_actor", 4, rank=2))
    found = deaths.find_in_run(made.info("running"))
    assert [death.pid for death in found] == [ACTOR, DRIVER, OTHER + 1, OTHER]


LOST = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:31665"


@pytest.mark.parametrize("kind", ["OutOfMemoryError", "ActorDiedError", "EngineDeadError"])
def test_the_rank_that_failed_comes_before_the_one_that_lost_it(made: Made, kind: str) -> None:
    made.process(ACTOR, raised("RuntimeError", 8, "update_actor", "actor", LOST))
    made.process(OTHER, raised(kind, 5, "update_actor", "rollout", "CUDA out of memory"))
    found = deaths.find_in_run(made.info("failed", 1, error="ChildFailedError"))
    assert [death.pid for death in found] == [OTHER, ACTOR]


def test_a_host_whose_clock_is_late_is_no_reason_to_name_the_wrong_rank(made: Made) -> None:
    made.process(ACTOR, raised("RuntimeError", 3, "update_actor", "actor", LOST))
    made.process(OTHER, raised("OutOfMemoryError", 5, "update_actor", "rollout", "CUDA out of memory"), host="node2")
    found = deaths.find_in_run(made.info("failed", 1, error="ChildFailedError", hosts=[HOST, "node2"]))
    assert [death.pid for death in found] == [OTHER, ACTOR]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("WorkerCrashedError", "The worker died unexpectedly while executing this task. Check python-core-worker"),
        ("ActorDiedError", "The actor died unexpectedly before finishing this task."),
        ("LocalRayletDiedError", "The task's local raylet died. Check raylet.out for more information."),
        ("OwnerDiedError", "The object's owner has exited. This is the Python worker that first created the ObjectRef"),
        ("EngineDeadError", "EngineCore encountered an issue. See stack trace (above) for the root cause."),
    ],
)
def test_a_process_that_is_gone_comes_before_an_exception_that_says_so_without_naming_it(
    made: Made, kind: str, message: str
) -> None:
    made.process(TRAINER, raised(kind, 5, "generate", message=message))
    made.process(ACTOR, begun("generate", 3))
    found = deaths.find_in_run(made.info("failed", 1, error=kind, died=[as_noted(made)]))
    assert [death.pid for death in found] == [ACTOR, TRAINER]


def test_a_worker_that_ray_killed_for_memory_comes_before_the_exception_that_says_so(made: Made) -> None:
    named = {"pid": ACTOR, "cause": "memory", "used_bytes": 27_000_000_000, "limit_bytes": 28_000_000_000}
    made.process(ACTOR, begun("generate", 3), host="node2")
    made.process(TRAINER, raised("OutOfMemoryError", 5, "generate", named=[named]))
    found = deaths.find_in_run(made.info("failed", 1, error="RayTaskError(OutOfMemoryError)", hosts=[HOST, "node2"]))
    said = "actor rank 1 on node2 was killed by Ray (out of memory: 27.00 GB of 28.00 GB used) in generate of step 143"
    assert deaths.sentence(found[0], hosts=2) == said
    assert found[1].pid == TRAINER


def test_the_peak_of_a_group_is_read(tmp_path: Path) -> None:
    group = kernel(tmp_path / "group", kills=1)
    assert memory_state.peak_of(group) == 61_800_000_000
    assert memory_state.kills("") == memory_state.peak_of("") == 0


TIMEOUT = raised("RuntimeError", 100, "update_actor", "actor", "Timed out waiting for recv")


@pytest.mark.parametrize(
    ("killed_at", "first"),
    [
        (200, "actor rank 0 failed with RuntimeError: Timed out waiting for recv in reward.py:44 fetch_score"),
        (50, "actor rank 1 was killed by SIGTERM in reward of step 143; it was in reward.py:31 fetch_score"),
    ],
)
def test_a_process_that_was_killed_after_a_failure_is_a_victim(made: Made, killed_at: int, first: str) -> None:
    made.process(ACTOR, begun("update_actor", 0, rank=0), TIMEOUT)
    made.process(OTHER, begun("reward", 10))
    made.kill(OTHER, killed_at, 31)
    found = deaths.find_in_run(made.info("failed", 1))
    assert text(found).startswith(first)
    assert len(found) == 2


@pytest.mark.parametrize(
    ("lines", "host", "state", "sentences"),
    [
        # A dump that a child of the process wrote, which C code had forked.
        ([begun("reward", 10), begun("reward", 9000)], HOST, "running", ["vanished in reward of step 143"]),
        ([begun("reward", 10)], HOST, "ended", []),
        ([begun("reward", 10)], "node7", "running", ["was killed by SIGTERM in reward of step 143; it was in"]),
        ([], HOST, "running", []),
    ],
)
def test_only_the_place_of_a_dead_process_is_reported(
    made: Made, lines: list[dict], host: str, state: str, sentences: list[str]
) -> None:
    made.process(OTHER, *lines, host=host)
    made.kill(OTHER, 200, 31, host)
    made.process(DRIVER)
    found = [deaths.sentence(death) for death in deaths.find_in_run(made.info(state, 0)) if not death.started]
    assert [part in sentence for part, sentence in zip(sentences, found, strict=True)] == [True] * len(sentences)


def test_a_process_without_steps_died_in_the_loop_of_the_trainers_step(made: Made) -> None:
    step = begun("step", 0, "trainer", 0, span="step") | {"ids": {"loop": 2}}
    made.process(DRIVER, span("step", 0, 9, "step"), step)
    made.process(OTHER, begun("reward", 10))
    found = deaths.find_in_run(made.info("unfinished"))
    texts = [deaths.sentence(death) for death in found]
    assert [" of step 143 (loop 2) " in text or " in step 143 (loop 2) " in text for text in texts] == [True, True]


@pytest.mark.parametrize(
    ("seen_s", "order", "word"),
    [
        ((10, 20), (DRIVER, ACTOR), "before or after that: "),
        ((20, 10), (DRIVER, ACTOR), "before or after that: "),
        ((90, 10), (ACTOR, DRIVER), "then: "),
        ((10, 90), (DRIVER, ACTOR), "then: "),
    ],
)
def test_the_order_of_vanished_processes_is_unknown_unless_one_was_silent_for_long(
    made: Made, seen_s: tuple[int, int], order: tuple[int, int], word: str
) -> None:
    for pid, last_s, step in zip((DRIVER, ACTOR), seen_s, (143, None), strict=True):
        line = begun("update_actor", last_s * 1000, rank=0, step=step)  # type: ignore[arg-type]
        made.process(pid, begun("gen", 0, rank=0, step=step), line)  # type: ignore[arg-type]
    found = deaths.find_in_run(made.info("running"))
    assert tuple(death.pid for death in found) == order
    assert deaths.evidence(found)[-1].startswith(word)


def test_the_stack_of_a_death_has_the_users_functions_before_many_of_libraries(made: Made) -> None:
    torch = [{"function": f"call{n}", "file": "/x/site-packages/torch/nn/module.py", "line": n} for n in range(1, 13)]
    failed = raised("RuntimeError", 5)
    failed["exception"]["frames"][1:1] = torch
    made.process(TRAINER, begun("reward", 1), failed)
    found = deaths.find_in_run(made.info("failed", status=1))
    assert [line for line in deaths.evidence(found) if "functions of" in line or line.startswith("at ")] == [
        "at /x/site-packages/requests/api.py:73 get",
        "12 functions of libraries",
        "at /home/u/reward.py:44 fetch_score",
    ]
