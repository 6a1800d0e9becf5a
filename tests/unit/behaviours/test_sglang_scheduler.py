"""SGLang's scheduler: autoprof's requests, and passes recorded with the real profiler.
The schedulers are made up; real ones record in tests/engines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from autoprof.behaviours import sglang as sglang_scheduler
from autoprof.behaviours.rollout import Request
from autoprof.hooks.behaviour import CALL, Call, Outcome
from autoprof.run.runtime import Runtime
from tests.support.sglang_schedulers import DECODES, NOTHING, Scheduler, found, passes, receive, start, stop


@pytest.mark.parametrize(
    ("iterations", "recorded"), [("all", 8), ("0:3", 3), (":1", 1), ("2:5", 3), ("7:8", 1), ("5:100", 3)]
)
def test_the_passes_that_were_asked_for_are_recorded(run: Runtime, iterations: str, recorded: int) -> None:
    scheduler = Scheduler()
    before = dict(vars(scheduler))
    passes(scheduler, "DECODE")  # before the capture: not counted
    assert start(scheduler, rollout_iterations=iterations) == ""
    passes(scheduler, "EXTEND", *DECODES)
    assert stop(scheduler) == ""
    passes(scheduler, "DECODE")
    assert vars(scheduler) == before
    ((meta, names),) = found(run).values()
    assert (meta["state"], meta["reason"], meta["rank"], meta["replica"]) == ("complete", "", 5, 2)
    assert names.count("work") == sum(name.startswith("run_batch") for name in names) == recorded
    assert names.count("run_batch EXTEND") == (iterations in ("all", "0:3", ":1"))


def test_an_exception_in_a_pass_is_recorded_as_the_end_of_the_scheduler(run: Runtime) -> None:
    for error in (KeyboardInterrupt(), KeyError("a")):
        around = sglang_scheduler.SchedulerPass().around(Call("k", Scheduler.run_batch, (Scheduler(), None), {}))
        assert next(around) is CALL
        with pytest.raises(StopIteration):
            around.send(Outcome(None, error))
    assert raised_lines(run) == [("engine", "SGLang's scheduler", {"type": "KeyError", "message": "'a'"})]


@pytest.mark.parametrize(
    ("statuses", "named"),
    [
        ((None, None), []),
        ((None, 0), []),
        ((-9, None), [{"pid": 70, "name": "SGLang's scheduler_0", "signal": "SIGKILL"}]),
        ((None, 3), [{"pid": 71, "name": "SGLang's detokenizer", "status": 3}]),
    ],
)
def test_the_death_of_a_process_is_recorded_before_sglang_ends_the_server(
    run: Runtime, statuses: tuple[int | None, ...], named: list[dict[str, Any]]
) -> None:
    class Watchdog:
        _names = ("scheduler_0", "detokenizer")
        _processes = tuple(
            SimpleNamespace(pid=70 + i, exitcode=status, join=lambda _: 0) for i, status in enumerate(statuses)
        )

        def stop(self) -> int:
            return len(raised_lines(run))

    manager = SimpleNamespace(_subprocess_watchdog=Watchdog())
    for _ in range(2):
        around = sglang_scheduler.Tokenized().around(Call("k", lambda self: None, (manager,), {}))
        assert next(around) is CALL
    # The line is written before the watchdog's own method runs.
    assert manager._subprocess_watchdog.stop() == bool(named)
    error = {"type": "SGLang", "message": "the server ends, and kills its processes", "named": named}
    assert raised_lines(run) == ([("engine", named[0]["name"], error)] if named else [])


def raised_lines(run: Runtime) -> list[tuple[str, str, dict[str, Any]]]:
    texts = [text for path in run.rundir.lines("journal") for text in path.read_bytes().splitlines()]
    lines = [line for line in map(msgspec.json.decode, texts) if line["kind"] == "raised"]
    return [(line["span"], line["name"], line["exception"]) for line in lines]


def test_two_windows_without_a_restart(run: Runtime) -> None:
    scheduler = Scheduler()
    for step in (3, 4):
        start(scheduler, step, rollout_iterations="0:2")
        passes(scheduler, *DECODES)
        stop(scheduler)
        assert stop(scheduler) == ""
    assert list(found(run, 3)) == list(found(run, 4)) == ["TP-1"]


def test_unselected_ranks_write_nothing(run: Runtime) -> None:
    for scheduler in (Scheduler(tp_rank=0), Scheduler(tp_rank=1)):
        assert start(scheduler, ranks="5") == ""
        passes(scheduler, *DECODES)
        assert stop(scheduler) == ""
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
    request = Request(action="start", rank=4, replicas_in_one=not data_parallel_attention)
    assert sglang_scheduler._rank_and_part(scheduler, request) == (rank, part)
    # Since 0.5.13: in `ps` of the scheduler's profiler manager.
    assert sglang_scheduler._rank_and_part(SimpleNamespace(ps=scheduler), request) == (rank, part)
    # 0.5.23: from a function; the number of data-parallel ranks has another name there.
    told = {"num_dp_ranks" if name == "dp_size" else name: value for name, value in vars(scheduler).items()}
    monkeypatch.setattr(sglang_scheduler, "_parallel", lambda: SimpleNamespace(**told))
    assert sglang_scheduler._rank_and_part(SimpleNamespace(), request) == (rank, part)


def test_stages_have_a_trace_each_whatever_comes_between(run: Runtime) -> None:
    scheduler = Scheduler()
    start(scheduler, rollout_iterations="0:3", contents=("cpu", "profile-by-stage"))
    passes(scheduler, "EXTEND", "IDLE", "EXTEND", "DECODE", "DECODE", "EXTEND", "EXTEND", "DECODE", "DECODE", "EXTEND")
    assert stop(scheduler) == ""
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
    start(scheduler, rollout_iterations="1:3", contents=("profile-by-stage",))
    passes(scheduler, "EXTEND", "EXTEND", *DECODES)
    stop(scheduler)
    captures = found(run)
    assert captures["TP-1-EXTEND"][1].count("work") == 1
    assert captures["TP-1-DECODE"][1].count("work") == 2


@pytest.mark.parametrize("contents", [("cpu",), ("cpu", "profile-by-stage")])
def test_a_window_without_a_pass_is_failed(run: Runtime, contents: tuple[str, ...]) -> None:
    scheduler = Scheduler()
    start(scheduler, contents=contents)
    assert stop(scheduler) == NOTHING
    ((meta, names),) = found(run).values()
    assert (meta["state"], meta["reason"], names) == ("failed", NOTHING, [])
    # The file name of a stage that never began is free.
    assert not list(run.rundir.path.rglob("*.part"))


def test_a_window_that_ends_before_its_first_pass_is_failed_and_never_fires(run: Runtime) -> None:
    scheduler = Scheduler()
    start(scheduler, rollout_iterations="50:60")
    passes(scheduler, *DECODES)
    why = "the engine ran 7 forward passes; recording was to begin after 50"
    assert stop(scheduler) == why
    passes(scheduler, *DECODES * 8)
    ((meta, _),) = found(run).values()
    assert (meta["state"], meta["reason"]) == ("failed", why)


def test_a_truncated_capture_has_the_reason(run: Runtime) -> None:
    scheduler = Scheduler()
    start(scheduler, rollout_iterations="all")
    passes(scheduler, "DECODE")
    stop(scheduler, "somebody came")
    start(scheduler, 4, rollout_iterations="all")
    stop(scheduler, "somebody came")
    cut, before = found(run)["TP-1"][0], found(run, 4)["TP-1"][0]
    assert (cut["state"], cut["reason"]) == ("truncated", "somebody came")
    assert (before["state"], before["reason"][:13]) == ("failed", "somebody came")


def test_a_start_without_a_stop_before_it(run: Runtime) -> None:
    scheduler = Scheduler()
    start(scheduler, rollout_iterations="all")
    passes(scheduler, "DECODE")
    start(scheduler, 4, rollout_iterations="all")
    passes(scheduler, "DECODE")
    assert stop(scheduler) == ""
    assert found(run)["TP-1"][0]["reason"] == "a new request came before the stop"
    assert found(run, 4)["TP-1"][0]["state"] == "complete"


@pytest.mark.parametrize("folder", [None, "/tmp", "/run/global_step_000001"])
def test_other_requests_pass_unchanged(run: Runtime, folder: str | None) -> None:
    request = SimpleNamespace(output_dir=folder, start_step=3)
    assert receive(Scheduler(), request) is None
    assert request == SimpleNamespace(output_dir=folder, start_step=3)


def test_another_profiler_has_priority(run: Runtime) -> None:
    scheduler = Scheduler()
    start(scheduler, rollout_iterations="all")
    passes(scheduler, "DECODE")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as theirs:
        passes(scheduler, "DECODE", "DECODE")
        assert stop(scheduler) == ""
        assert "another torch profiler" in start(scheduler, 4)
    assert [event.count for event in theirs.key_averages() if event.key == "work"] == [2]
    meta, names = found(run)["TP-1"]
    assert (meta["state"], names.count("work")) == ("truncated", 1)


def test_another_profiler_between_the_start_and_the_first_pass(run: Runtime) -> None:
    scheduler = Scheduler()
    start(scheduler, rollout_iterations="all")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        passes(scheduler, "DECODE")
    passes(scheduler, "DECODE")
    assert "another profiler" in stop(scheduler)
    assert found(run)["TP-1"][0]["state"] == "failed"


def test_a_folder_that_cannot_be_made_is_answered(run: Runtime) -> None:
    run.rundir.path.mkdir()
    run.rundir.step(3).write_text("")
    scheduler = Scheduler()
    assert start(scheduler).startswith("FileExistsError")
    passes(scheduler, "DECODE")
    assert stop(scheduler) == ""


def test_a_full_disk_is_noted(run: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Any, path: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("autoprof.capture.profilers.torch.TorchTool.export", full)
    scheduler = Scheduler()
    start(scheduler, rollout_iterations="0:1")
    passes(scheduler, *DECODES)
    stop(scheduler)
    meta, _ = found(run)["TP-1"]
    assert (meta["state"], "No space left" in meta["reason"]) == ("failed", True)


def test_a_scheduler_without_work_pauses_while_it_is_recorded(run: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("autoprof.behaviours.sglang.time.sleep", pauses.append)
    scheduler = Scheduler()
    start(scheduler, rollout_iterations="0:2")

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
    stop(scheduler)
    assert "get_next_batch_to_run" not in vars(scheduler)
