"""SGLang's scheduler: autoprof's orders, and the passes that are recorded with the real profiler.
The schedulers are made up; real ones record in tests/engines."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from autoprof import capture, ending, rundir
from autoprof.behaviours import sglang_scheduler
from autoprof.behaviours.sglang_scheduler import MARK, Order, Pass
from autoprof.behaviours.sglang_scheduler import Scheduler as Requests
from autoprof.runtime import Runtime
from autoprof.wrapping import CALL, Call, Outcome, Reply

NOTHING = "the engine ran 0 forward passes"


@dataclass
class Mode:
    """SGLang's ForwardMode."""

    name: str

    def is_decode(self) -> bool:
        return self.name == "DECODE"

    def is_extend(self) -> bool:
        return self.name in ("EXTEND", "MIXED")


class Scheduler:
    """A scheduler up to 0.5.12; a pass leaves `work` in a trace."""

    def __init__(self, **ranks: int) -> None:
        self.tp_rank = 1
        self.tp_size = 2
        vars(self).update(ranks)

    def run_batch(self, batch: Any) -> None:
        with torch.profiler.record_function("work"):
            torch.ones(3).sum()

    def get_next_batch_to_run(self) -> None:
        """What an event loop polls."""


@pytest.fixture
def run(joined: Callable[..., Runtime], monkeypatch: pytest.MonkeyPatch) -> Runtime:
    monkeypatch.setattr(sglang_scheduler, "_answer", lambda message: message)
    monkeypatch.setattr(sglang_scheduler, "_session", None)
    capture.watch_others()
    return joined()


def send(holder: Any, action: Any, **order: Any) -> str:
    """Pass an order through the hook; returns the problem."""
    asked = {"step": 3, "replica": 2, "rank": 4, "contents": ("cpu",)} if action == "start" else {}
    text = msgspec.json.encode(Order(action=action, **(asked | order))).decode()
    reply = receive(holder, SimpleNamespace(output_dir=MARK + text))
    assert isinstance(reply, Reply)
    assert reply.value.startswith(MARK)
    return str(reply.value.removeprefix(MARK))


def receive(holder: Any, request: Any) -> Any:
    """Pass a request through the hook; returns autoprof's reply, or None where SGLang's own method was called."""

    def profile(self: Any, recv_req: Any) -> None:
        raise NotImplementedError

    around = Requests().around(Call("sglang/scheduler", profile, (holder, request), {}))
    try:
        assert next(around) is CALL
    except StopIteration as stop:
        return stop.value
    with pytest.raises(StopIteration):
        around.send(Outcome(None, None))
    return None


def passes(scheduler: Scheduler, *stages: str) -> None:
    for stage in stages:
        call = Call("sglang/pass", Scheduler.run_batch, (scheduler, SimpleNamespace(forward_mode=Mode(stage))), {})
        around = Pass().around(call)
        assert next(around) is CALL
        scheduler.run_batch(None)
        with pytest.raises(StopIteration):
            around.send(Outcome(None, None))


def found(run: Runtime, step: int = 3) -> dict[str, tuple[dict[str, Any], list[str]]]:
    """By the engine's rank part: the meta file, and the names of the trace's events."""
    ending.wait_for_files(run)
    captures = {}
    for path in run.rundir.step(step).glob("*.meta.json"):
        trace = Path(str(path).replace(rundir.META, rundir.TRACE))
        events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"] if trace.exists() else []
        names = [event.get("name", "") for event in events if event.get("ph") == "X"]
        captures[path.name.split(".")[2]] = (json.loads(path.read_text()), names)
    return captures


DECODES = ["DECODE"] * 7


@pytest.mark.parametrize(
    ("iterations", "recorded"), [("all", 8), ("0:3", 3), (":1", 1), ("2:5", 3), ("7:8", 1), ("5:100", 3)]
)
def test_the_passes_that_were_asked_for_are_recorded(run: Runtime, iterations: str, recorded: int) -> None:
    scheduler = Scheduler()
    before = dict(vars(scheduler))
    passes(scheduler, "DECODE")  # before the capture: not counted
    assert send(scheduler, "start", iterations=iterations) == ""
    passes(scheduler, "EXTEND", *DECODES)
    assert send(scheduler, "stop") == ""
    passes(scheduler, "DECODE")
    assert vars(scheduler) == before
    ((meta, names),) = found(run).values()
    assert (meta["state"], meta["reason"], meta["rank"], meta["replica"]) == ("complete", "", 5, 2)
    assert names.count("work") == sum(name.startswith("run_batch") for name in names) == recorded
    assert names.count("run_batch EXTEND") == (iterations in ("all", "0:3", ":1"))


def test_two_windows_without_a_restart(run: Runtime) -> None:
    scheduler = Scheduler()
    for step in (3, 4):
        send(scheduler, "start", step=step, iterations="0:2")
        passes(scheduler, *DECODES)
        send(scheduler, "stop")
        assert send(scheduler, "stop") == ""
    assert list(found(run, 3)) == list(found(run, 4)) == ["TP-1"]


def test_ranks_that_nobody_asked_for_write_nothing(run: Runtime) -> None:
    for scheduler in (Scheduler(tp_rank=0), Scheduler(tp_rank=1)):
        assert send(scheduler, "start", ranks="5") == ""
        passes(scheduler, *DECODES)
        assert send(scheduler, "stop") == ""
    assert list(found(run)) == ["TP-1"]


@pytest.mark.parametrize(
    ("ranks", "data_parallel_attention", "part", "rank"),
    [
        ({}, False, "TP-1", 5),
        ({"pp_rank": 1, "pp_size": 2}, False, "TP-1-PP-1", 7),
        ({"dp_rank": 3, "dp_size": 4}, False, "TP-1-DP-3", 11),
        ({"dp_rank": 1, "dp_size": 2, "moe_ep_rank": 1, "moe_ep_size": 2}, True, "TP-1-DP-1-EP-1", 5),
        ({"dp_rank": None, "dp_size": 1}, False, "TP-1", 5),
    ],
)
def test_ranks_are_told_apart_in_every_release(
    run: Runtime,
    monkeypatch: pytest.MonkeyPatch,
    ranks: dict[str, int],
    data_parallel_attention: bool,
    part: str,
    rank: int,
) -> None:
    scheduler = Scheduler(**ranks)
    order = Order(action="start", rank=4, replicas_in_one=not data_parallel_attention)
    assert sglang_scheduler._place(scheduler, order) == (rank, part)
    # From 0.5.13 on: in `ps` of what profiles for the scheduler.
    assert sglang_scheduler._place(SimpleNamespace(ps=scheduler), order) == (rank, part)
    # 0.5.23: asked of a function, where the number of data-parallel ranks has another name.
    told = {"num_dp_ranks" if name == "dp_size" else name: value for name, value in vars(scheduler).items()}
    monkeypatch.setattr(sglang_scheduler, "_parallel", lambda: SimpleNamespace(**told))
    assert sglang_scheduler._place(SimpleNamespace(), order) == (rank, part)


def test_stages_have_a_trace_each_whatever_comes_between(run: Runtime) -> None:
    scheduler = Scheduler()
    send(scheduler, "start", iterations="0:3", contents=("cpu", "profile-by-stage"))
    passes(scheduler, "EXTEND", "IDLE", "EXTEND", "DECODE", "DECODE", "EXTEND", "EXTEND", "DECODE", "DECODE", "EXTEND")
    assert send(scheduler, "stop") == ""
    captures = found(run)
    assert {part: meta["state"] for part, (meta, _) in captures.items()} == dict.fromkeys(
        ["TP-1-EXTEND", "TP-1-DECODE"], "complete"
    )
    extend, decode = captures["TP-1-EXTEND"][1], captures["TP-1-DECODE"][1]
    assert (extend.count("run_batch EXTEND"), extend.count("run_batch DECODE")) == (2, 0)
    assert (decode.count("run_batch EXTEND"), decode.count("run_batch DECODE")) == (2, 3)
    assert captures["TP-1-DECODE"][0]["contents"] == ["cpu", "profile-by-stage"]
    assert captures["TP-1-DECODE"][0]["left_out"] == []


def test_stages_may_begin_later_than_the_capture(run: Runtime) -> None:
    scheduler = Scheduler()
    send(scheduler, "start", iterations="1:3", contents=("profile-by-stage",))
    passes(scheduler, "EXTEND", "EXTEND", *DECODES)
    send(scheduler, "stop")
    captures = found(run)
    assert captures["TP-1-EXTEND"][1].count("work") == 1
    assert captures["TP-1-DECODE"][1].count("work") == 2


@pytest.mark.parametrize("contents", [("cpu",), ("cpu", "profile-by-stage")])
def test_a_window_without_a_pass_is_failed(run: Runtime, contents: tuple[str, ...]) -> None:
    scheduler = Scheduler()
    send(scheduler, "start", contents=contents)
    assert send(scheduler, "stop") == NOTHING
    ((meta, names),) = found(run).values()
    assert (meta["state"], meta["reason"], names) == ("failed", NOTHING, [])
    # The name of a stage that never came is nobody's.
    assert not list(run.rundir.path.rglob("*.part"))


def test_a_window_that_ends_before_its_first_pass_is_failed_and_never_fires(run: Runtime) -> None:
    scheduler = Scheduler()
    send(scheduler, "start", iterations="50:60")
    passes(scheduler, *DECODES)
    why = "the engine ran 7 forward passes; recording was to begin after 50"
    assert send(scheduler, "stop") == why
    passes(scheduler, *DECODES * 8)
    ((meta, _),) = found(run).values()
    assert (meta["state"], meta["reason"]) == ("failed", why)


def test_what_is_cut_says_so(run: Runtime) -> None:
    scheduler = Scheduler()
    send(scheduler, "start", iterations="all")
    passes(scheduler, "DECODE")
    send(scheduler, "stop", reason="somebody came")
    send(scheduler, "start", step=4, iterations="all")
    send(scheduler, "stop", reason="somebody came")
    cut, before = found(run)["TP-1"][0], found(run, 4)["TP-1"][0]
    assert (cut["state"], cut["reason"]) == ("truncated", "somebody came")
    assert (before["state"], before["reason"][:13]) == ("failed", "somebody came")


def test_a_start_after_one_whose_stop_never_came(run: Runtime) -> None:
    scheduler = Scheduler()
    send(scheduler, "start", iterations="all")
    passes(scheduler, "DECODE")
    send(scheduler, "start", step=4, iterations="all")
    passes(scheduler, "DECODE")
    assert send(scheduler, "stop") == ""
    assert found(run)["TP-1"][0]["reason"] == "whoever started it went away"
    assert found(run, 4)["TP-1"][0]["state"] == "complete"


@pytest.mark.parametrize("folder", [None, "/tmp", "/run/global_step_000001"])
def test_somebody_elses_requests_pass_unchanged(run: Runtime, folder: str | None) -> None:
    request = SimpleNamespace(output_dir=folder, start_step=3)
    assert receive(Scheduler(), request) is None
    assert request == SimpleNamespace(output_dir=folder, start_step=3)


def test_somebody_elses_profiler_goes_first(run: Runtime) -> None:
    scheduler = Scheduler()
    send(scheduler, "start", iterations="all")
    passes(scheduler, "DECODE")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as theirs:
        passes(scheduler, "DECODE", "DECODE")
        assert send(scheduler, "stop") == ""
        assert "another torch.profiler" in send(scheduler, "start", step=4)
    assert [event.count for event in theirs.key_averages() if event.key == "work"] == [2]
    meta, names = found(run)["TP-1"]
    assert (meta["state"], names.count("work")) == ("truncated", 1)


def test_somebody_elses_profiler_between_the_start_and_the_first_pass(run: Runtime) -> None:
    scheduler = Scheduler()
    send(scheduler, "start", iterations="all")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        passes(scheduler, "DECODE")
    passes(scheduler, "DECODE")
    assert "another profiler" in send(scheduler, "stop")
    assert found(run)["TP-1"][0]["state"] == "failed"


def test_a_folder_that_cannot_be_made_is_answered(run: Runtime) -> None:
    run.rundir.path.mkdir()
    run.rundir.step(3).write_text("")
    scheduler = Scheduler()
    assert send(scheduler, "start").startswith("FileExistsError")
    passes(scheduler, "DECODE")
    assert send(scheduler, "stop") == ""


def test_a_full_disk_is_noted(run: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Any, path: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("autoprof.tools.torch.TorchTool.export", full)
    scheduler = Scheduler()
    send(scheduler, "start", iterations="0:1")
    passes(scheduler, *DECODES)
    send(scheduler, "stop")
    meta, _ = found(run)["TP-1"]
    assert (meta["state"], "No space left" in meta["reason"]) == ("failed", True)


def test_a_scheduler_without_work_pauses_while_it_is_recorded(run: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("autoprof.behaviours.sglang_recorder.time.sleep", pauses.append)
    scheduler = Scheduler()
    send(scheduler, "start", iterations="0:2")

    def poll(turns: int) -> int:
        pauses.clear()
        for _ in range(turns):
            scheduler.get_next_batch_to_run()
        return len(pauses)

    assert poll(100) == 0
    passes(scheduler, "DECODE")
    assert poll(10) == 0
    assert poll(100) > 50
    assert max(pauses) <= 0.02
    passes(scheduler, "DECODE")
    assert poll(10) == 0
    passes(scheduler, "DECODE")  # the window is over
    assert poll(100) == 0
    send(scheduler, "stop")
    assert "get_next_batch_to_run" not in vars(scheduler)
