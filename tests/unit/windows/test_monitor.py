"""Statistics of processes, and the conditions that the driving process applies to them, with invented times."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from pytest_mock import MockerFixture

from autoprof.base import identity
from autoprof.config import selection
from autoprof.config.settings import Settings
from autoprof.run import cluster
from autoprof.run.cluster import StepAnnouncement
from autoprof.run.runtime import Runtime
from autoprof.rundir.records import Line
from autoprof.windows import chooser, monitor, requests, stats
from autoprof.windows.chooser import Chooser
from autoprof.windows.stats import RankStats, ReplicaStats

Made = Callable[..., Runtime]


@pytest.fixture
def kept(mocker: MockerFixture) -> dict[str, bytes]:
    """Return the content of the store, here a dictionary. Statistics are sent immediately."""
    kept: dict[str, bytes] = {}
    mocker.patch.object(cluster, "is_up", return_value=True)
    mocker.patch.object(cluster, "put", side_effect=lambda key, value: bool(kept.update({key: value}) or True))
    mocker.patch.object(
        cluster, "entries", side_effect=lambda prefix: {k: v for k, v in kept.items() if k.startswith(prefix)}
    )
    mocker.patch.object(chooser, "_register")
    mocker.patch.object(threading.Thread, "start", lambda self: self.run())
    mocker.patch.object(monitor, "_PATIENCE_S", 0.0)
    return kept


def line(kind: str, name: str, took_s: float, **values: Any) -> Line:
    values = {"step": None, "role": "actor", "rank": 0} | values
    return Line(kind=kind, name=name, start_ns=0, end_ns=round(took_s * 1e9), **values)


class Trainer:
    """Trainer whose steps have given durations."""

    def __init__(self, run: Runtime, takes: bool = True) -> None:
        run.rundir.make(run.rundir.path)
        self.teller = stats.attach(run)
        self.takes = takes
        self.run = run
        self.chooser = Chooser(of_trainer=True)
        self.ordinal = 0
        self.captured: dict[int, dict[str, Any]] = {}

    def step(self, number: int, took_s: float = 10.0, error: str | None = None, **stages: float) -> None:
        self.ordinal += 1
        run = self.run
        self.chooser.look(run.rundir, number, take_it=self.takes)
        self.chooser.step_began(run, number, self.ordinal)
        overrides = self.chooser.choose(run.settings, number, self.ordinal)
        if overrides is not None:
            self.captured[number] = self.chooser.with_stragglers(overrides, lambda: {0: 0, 1: 4})
        cluster._state.own = StepAnnouncement(step=number, captured=overrides is not None)
        for name, took in stages.items():
            self.teller.hear(line("timer", name, took, step=number, role="trainer", rank=None))
        self.teller.hear(line("step", "step", took_s, step=number, role="trainer", error=error))
        cluster._state.own = None
        self.chooser.step_ended(number, self.ordinal)

    def steps(self, *numbers: int, took_s: float = 10.0) -> None:
        for number in numbers:
            self.step(number, took_s)

    def any_after(self) -> bool:
        return self.chooser.any_after(self.run.settings, 99, self.ordinal)


def worker(run: Runtime) -> stats.StatsReporter:
    """Return the reporter of another process of the run."""
    other = msgspec.structs.replace(run.info)
    made = Runtime(other)
    return stats.attach(made)


def test_the_step_after_a_slow_one_is_captured_with_the_reason_and_settings_of_its_own(made: Made) -> None:
    when = selection.Condition(what="step", above=2.0, steps=2, at_most=1, overrides={"contents": ("cpu",)})
    trainer = Trainer(made(steps="", when=(when,)))
    trainer.steps(*range(1, 41))
    assert trainer.any_after()
    trainer.step(41, 25.0)
    trainer.steps(42, 43, 44, 45)
    why = "step 41 took 25.0 s, 2.5 times the median of 10.0 s (step>2x)"
    assert trainer.captured == {number: {"contents": ("cpu",), "reason": why} for number in (42, 43)}
    assert not trainer.any_after()
    read = trainer.run.settings.overridden(trainer.captured[42])
    assert (read.reason, read.contents) == (why, ("cpu",))


@pytest.mark.parametrize("error", [None, "RuntimeError"])
def test_captured_steps_and_steps_that_raise_are_not_compared(error: str | None, made: Made) -> None:
    trainer = Trainer(made(steps="20" if error is None else "", when=selection.parse_conditions("step>2x")))
    trainer.steps(*range(1, 20))
    trainer.step(20, 90.0, error)
    trainer.step(21)
    assert list(trainer.captured) == ([20] if error is None else [])


def test_the_step_after_a_captured_one_is_not_compared(made: Made) -> None:
    """Traces are still exported in this step, which holds the interpreter's lock."""
    trainer = Trainer(made(steps="20", when=selection.parse_conditions("step>2x,gen>2x")))
    for number in range(1, 20):
        trainer.step(number, gen=4.0)
    trainer.step(20, 90.0, gen=80.0)
    trainer.step(21, 50.0, gen=44.0)
    trainer.step(22, gen=4.0)
    assert list(trainer.captured) == [20]
    trainer.step(23, 50.0, gen=44.0)
    trainer.step(24, gen=4.0)
    assert list(trainer.captured) == [20, 24]


@pytest.mark.parametrize(("steps", "count"), [("::2", 1), ("::3", 0)])
def test_steps_that_leave_none_to_compare_are_reported(
    steps: str, count: int, made: Made, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Trainer(made(steps=steps, when=selection.parse_conditions("step>2x,oom")))
    trainer.steps(*range(1, 31))
    warning = "AUTOPROF_WHEN: step compared none of 10 steps: captured steps and the steps after them are not compared"
    assert caplog.text.count(warning) == count


def test_the_first_steps_after_a_resume(made: Made) -> None:
    run = made(steps="", when=selection.parse_conditions("resume:2"))
    trainer = Trainer(run)
    trainer.steps(4001)
    assert trainer.any_after()
    trainer.steps(4002, 4003)
    assert list(trainer.captured) == [4001, 4002]
    assert trainer.captured[4001] == {"reason": "the run was resumed at step 4001 (resume:2)"}
    assert not trainer.any_after()
    begun = Trainer(run)
    begun.steps(1, 2, 3)
    assert begun.captured == {}


def test_what_was_asked_for_by_hand_goes_first_and_the_window_comes_after_it(made: Made) -> None:
    trainer = Trainer(made(steps="", when=selection.parse_conditions("step>2x")))
    trainer.steps(*range(1, 10))
    trainer.step(10, 25.0)
    requests.ask(trainer.run.rundir, requests.Trigger(run="run"))
    trainer.steps(11, 12, 13)
    assert [each["reason"] for each in trainer.captured.values()] == [
        "autoprof trigger",
        "step 10 took 25.0 s, 2.5 times the median of 10.0 s (step>2x)",
    ]
    assert list(trainer.captured) == [11, 12]


def test_a_run_that_is_switched_off_opens_no_window(made: Made) -> None:
    trainer = Trainer(made(steps="", when=selection.parse_conditions("step>2x")))
    trainer.steps(*range(1, 10))
    trainer.step(10, 25.0)
    requests.switch(trainer.run.rundir, off=True)
    trainer.steps(11)
    assert trainer.captured == {}


def test_no_more_steps_are_captured_than_may_be(made: Made) -> None:
    when = (selection.Condition(what="step", above=2.0, steps=5),)
    trainer = Trainer(made(steps="", when=when, max_steps=2))
    trainer.steps(*range(1, 10))
    trainer.step(10, 25.0)
    trainer.steps(11, 12, 13, 14)
    assert list(trainer.captured) == [11, 12]


def test_a_worker_tells_once_a_step_when_its_last_stage_has_ended(made: Made, kept: dict[str, bytes]) -> None:
    run = made(when=selection.parse_conditions("rank>1.3x"))
    told = worker(run)
    puts = []
    for step in range(1, 5):
        stages = ["compute_log_prob", "update_actor", "update_actor", "update_weights"]
        # A stage that runs only in some steps does not count.
        for stage in stages if step != 3 else [*stages, "save_checkpoint"]:
            told.hear(line("stage", stage, 1.0, step=step, rank=3))
            puts.append((step, stage, len(cluster.put.call_args_list)))  # type: ignore[attr-defined]
    told_after = [count for _, stage, count in puts if stage == "update_weights"]
    # The last stage is unknown in the first step, and after a step that ended with another stage.
    assert told_after == [0, 2, 3, 3]
    entry = msgspec.json.decode(kept["told/run/rank.actor.3"], type=RankStats)
    stages = {"compute_log_prob": 1.0, "update_actor": 2.0, "update_weights": 1.0}
    assert (entry.rank, entry.step, entry.stages) == (3, 3, {"actor": stages})


def test_nobody_tells_what_no_condition_needs(made: Made, kept: dict[str, bytes]) -> None:
    told = worker(made(when=selection.parse_conditions("step>2x, update_actor>2x, resume:2")))
    for step in range(1, 5):
        told.hear(line("stage", "update_actor", 1.0, step=step, rank=3))
        told.hear(line("request", "generate", 1.0, role="rollout", ids={"replica": 0}))
    assert kept == {}


def test_an_error_of_ours_costs_the_comparison_alone(made: Made, mocker: MockerFixture) -> None:
    trainer = Trainer(made(steps="2", when=selection.parse_conditions("step>2x")))
    report = mocker.patch("autoprof.run.runtime.report")
    for name in ("step_began", "step_ended", "with_stragglers"):
        mocker.patch.object(monitor.Monitor, name, side_effect=LookupError(name))
    trainer.steps(1, 2, 3)
    assert trainer.captured == {2: {}}
    assert report.call_count == 7


def test_a_slow_rank_opens_a_window(made: Made, kept: dict[str, bytes]) -> None:
    trainer = Trainer(made(steps="", when=selection.parse_conditions("rank>1.3x")))
    for number in range(1, 12):
        for rank in range(3):
            took = 9.0 if (number, rank) == (9, 2) else 4.0
            stages = {"actor": {"update_actor": took}}
            entry = RankStats(role="actor", rank=rank, host="node1", step=number, stages=stages, ends=stages)
            kept[f"told/run/rank.actor.{rank}"] = msgspec.json.encode(entry)
        kept["told/run/rank.other.0"] = b"{"
        trainer.step(number)
    why = "actor rank 2 took 9.00 s for update_actor in step 9, 2.2 times the median of the others, 4.00 s (rank>1.3x)"
    assert trainer.captured == {10: {"reason": why}}


def test_a_step_that_is_slow_for_its_slowest_rank_is_one_window(made: Made, kept: dict[str, bytes]) -> None:
    trainer = Trainer(made(steps="", when=selection.parse_conditions("step>2x, rank>1.3x")))
    trainer.steps(*range(1, 10))
    for rank in range(3):
        stages = {"actor": {"update_actor": 9.0 * rank + 1}}
        entry = RankStats(role="actor", rank=rank, host="node1", step=10, stages=stages, ends=stages)
        kept[f"told/run/rank.actor.{rank}"] = msgspec.json.encode(entry)
    trainer.step(10, 25.0)
    trainer.steps(11, 12)
    assert list(trainer.captured) == [11]
    assert trainer.captured[11]["reason"].count("; actor rank 2 took 19.0 s") == 1


def test_replicas_tell_what_they_have_generated_and_are_compared_by_step(
    made: Made, kept: dict[str, bytes], mocker: MockerFixture
) -> None:
    mocker.patch.object(stats, "_IDLE_S", 0.0)
    run = made(steps="", when=selection.parse_conditions("replica>1.5x"), ranks="slowest")
    trainer = Trainer(run)
    replicas = [worker(run), worker(run)]
    for number in range(1, 12):
        for replica, teller in enumerate(replicas):
            for _ in range(3):
                took = 30.0 if (number, replica) == (9, 1) else 2.0 + replica
                ids, counts = {"replica": replica, "request": "x"}, {"response_tokens": 1000}
                teller.hear(line("request", "generate", took, role="rollout", ids=ids, counts=counts))
        trainer.step(number)
    entry = msgspec.json.decode(kept["told/run/replica.1"], type=ReplicaStats)
    assert (entry.requests, entry.tokens) == (33, 33000)
    assert entry.seconds == pytest.approx(30 * 3.0 + 3 * 30.0)
    assert list(trainer.captured) == [10]
    assert trainer.captured[10]["reason"] == (
        "replica 1 took 30.0 ms a token in step 9, 15.0 times the median of the others, 2.00 ms (replica>1.5x)"
    )
    ranks, why = trainer.captured[10]["slowest"]["rollout"]
    assert ranks == "4"
    assert why.startswith("slowest:1: replica 1 8.40 ms a token in the last 5 steps that were compared; ")


def test_what_is_told_is_sent_once_a_second_at_most(made: Made, mocker: MockerFixture) -> None:
    send = mocker.patch.object(stats.StatsChannel, "send")
    now = mocker.patch("autoprof.windows.stats.time.monotonic", return_value=100.0)
    teller = worker(made(when=selection.parse_conditions("replica>1.5x")))
    for at in (100.0, 100.2, 100.4, 103.0):
        now.return_value = at
        teller.hear(line("request", "generate", 1.0, role="rollout", ids={"replica": 0}))
    # An entry is read when it is sent, not when it was queued.
    assert [call.kwargs["earliest_s"] for call in send.call_args_list] == [100.0, 101.0, 103.0]


def test_running_out_of_memory_in_a_worker_opens_a_window(made: Made, kept: dict[str, bytes]) -> None:
    run = made(steps="", when=selection.parse_conditions("oom"))
    trainer, told = Trainer(run), worker(run)
    trainer.step(1)
    told.hear(line("stage", "update_actor", 1.0, step=2, rank=1, error="OutOfMemoryError"))
    trainer.steps(2, 3, 4)
    why = "actor rank 1 ran out of memory in update_actor of step 2 (oom)"
    assert trainer.captured == {3: {"reason": why}}


def test_running_out_of_memory_in_the_trainers_own_process_opens_one(made: Made, kept: dict[str, bytes]) -> None:
    trainer = Trainer(made(steps="", when=selection.parse_conditions("oom")))
    trainer.step(1)
    cluster._state.own = StepAnnouncement(step=2, captured=False)
    trainer.teller.hear(line("stage", "update_actor", 1.0, step=2, error="OutOfMemoryError"))
    trainer.steps(2, 3, 4)
    assert list(trainer.captured) == [3]


def test_memory_above_a_share_opens_a_window(made: Made, kept: dict[str, bytes], mocker: MockerFixture) -> None:
    mocker.patch.object(stats, "memory_use", side_effect=[(0.5, "device"), *[(0.93, "device")] * 9])
    trainer = Trainer(made(steps="", when=selection.parse_conditions("memory>0.9")))
    trainer.steps(1, 2, 3, 4)
    why = "trainer rank 0 had reserved up to 93 % of its device's memory by step 2 (memory>0.9)"
    assert trainer.captured == {3: {"reason": why}}


def test_of_several_trainers_one_decides_and_asks_the_others(
    made: Made, monkeypatch: pytest.MonkeyPatch, kept: dict[str, bytes]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    run = made(steps="", when=selection.parse_conditions("step>2x"))
    monkeypatch.setenv("RANK", "0")
    first = Trainer(run)
    monkeypatch.setenv("RANK", "1")
    second = Trainer(Runtime(run.info), takes=False)
    for number in range(1, 14):
        for rank, trainer in ((0, first), (1, second)):
            monkeypatch.setenv("RANK", str(rank))
            trainer.step(number, 25.0 if number == 9 else 10.0)
    why = "step 9 took 25.0 s, 2.5 times the median of 10.0 s (step>2x)"
    # The other trainer may have begun step 10 when the request arrives.
    assert first.captured == second.captured == {11: {"reason": why}}


def test_a_window_whose_request_is_written_late_is_captured(
    made: Made, monkeypatch: pytest.MonkeyPatch, kept: dict[str, bytes]
) -> None:
    """The thread that compares ranks writes the request, while the trainer begins steps."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    late, ask = [], requests.ask
    monkeypatch.setattr(requests, "ask", lambda run, trigger: late.append(trigger))
    trainer = Trainer(made(steps="", when=selection.parse_conditions("step>2x")))
    for number in range(1, 15):
        trainer.step(number, 25.0 if number == 9 else 10.0)
        if number == 11:
            ask(trainer.run.rundir, late.pop())
    assert list(trainer.captured) == [13]


def test_ranks_that_a_launcher_started_tell_by_files(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made(when=selection.parse_conditions("rank>1.3x"))
    monkeypatch.setattr(threading.Thread, "start", lambda self: self.run())
    worker(run).send()
    assert not (run.rundir.path / "told").exists()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    worker(run).send()
    assert stats.read_entries(run, stats.RANK, RankStats) == [RankStats(role="trainer", rank=1, host=identity.HOST)]


def test_slowest_ranks_of_each_role_are_named_with_the_reason(made: Made, kept: dict[str, bytes]) -> None:
    run = made(steps="9", ranks="slowest:2", role={"ref": {"ranks": "1"}})
    trainer = Trainer(run)
    for number in range(1, 10):
        for rank in range(4):
            stages = {"actor": {"update_actor": 4.0 + rank % 3}, "ref": {"compute_ref_log_prob": 2.0}}
            entry = RankStats(role="actor", rank=rank, host="node1", step=number, stages=stages, ends=stages)
            kept[f"told/run/rank.actor.{rank}"] = msgspec.json.encode(entry)
        trainer.step(number)
    read = run.settings.overridden(trainer.captured[9])
    assert read.for_role("actor").ranks == "1,2"
    assert read.for_role("ref").ranks == "1"
    assert read.for_role("critic").ranks == "slowest:2"
    took = "rank 2 6.00 s, rank 1 5.00 s a step in the last 5 steps that were compared"
    assert read.found == {"actor": f"slowest:2: {took}; the median of 4 is 4.50 s"}
    assert read.reason == ""
    handed = msgspec.json.decode(msgspec.json.encode(trainer.captured[9]))
    assert run.settings.overridden(handed) == read


def test_all_trainers_of_a_launcher_know_the_slowest_rank_of_a_request(
    made: Made, monkeypatch: pytest.MonkeyPatch, kept: dict[str, bytes]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    run = made(steps="", ranks="slowest:1")
    monkeypatch.setenv("RANK", "0")
    first = Trainer(run)
    monkeypatch.setenv("RANK", "1")
    second = Trainer(Runtime(run.info), takes=False)
    for number in range(1, 12):
        for rank in (0, 1):
            stages = {"actor": {"update_actor": 4.0 + rank}}
            entry = RankStats(role="actor", rank=rank, host="node1", step=number, stages=stages, ends=stages)
            kept[f"told/run/rank.actor.{rank}"] = msgspec.json.encode(entry)
        if number == 9:
            requests.ask(run.rundir, requests.Trigger(run="run"))
        for rank, trainer in ((0, first), (1, second)):
            monkeypatch.setenv("RANK", str(rank))
            trainer.step(number)
    assert first.captured == second.captured
    assert {number: read["slowest"]["actor"][0] for number, read in second.captured.items()} == {10: "1"}


def test_slowest_ranks_are_rank_0_until_times_are_known(made: Made) -> None:
    trainer = Trainer(made(steps="2", ranks="slowest:2"))
    trainer.steps(1, 2, 3)
    assert trainer.captured == {2: {}}
    read = trainer.run.settings.overridden(trainer.captured[2])
    assert read.for_role("actor").ranks == "slowest:2"


def test_a_run_whose_ray_ends_reads_nothing_more(made: Made, mocker: MockerFixture) -> None:
    trainer = Trainer(made(steps="", when=selection.parse_conditions("rank>1.3x")))
    read = mocker.patch.object(stats, "read_entries")
    stats.stop()
    trainer.steps(1, 2, 3)
    read.assert_not_called()


@pytest.mark.parametrize("settings", [Settings(), Settings(steps="", ranks="all", role={"ref": {"ranks": "3"}})])
def test_without_a_setting_that_compares_nobody_listens(settings: Settings, made: Made) -> None:
    assert not settings.compares
    run = made()
    assert run.timeline.listener is None
    chooser = Chooser()
    chooser.step_began(run, 1, 1)
    assert chooser._monitor is None


@pytest.mark.parametrize(
    "settings",
    [
        Settings(when=selection.parse_conditions("oom")),
        Settings(ranks="slowest"),
        Settings(role={"rollout": {"ranks": "slowest:2"}}),
    ],
)
def test_what_compares(settings: Settings) -> None:
    assert settings.compares


def test_the_share_of_a_device_is_what_torch_reserved_at_most(mocker: MockerFixture) -> None:
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        current_device=lambda: 1,
        get_device_properties=lambda device: SimpleNamespace(total_memory=80),
        max_memory_reserved=lambda device: 60 if device == 1 else 0,
    )
    mocker.patch.dict("sys.modules", torch=SimpleNamespace(cuda=cuda))
    assert stats.memory_use() == (0.75, "device")
    cuda.is_initialized = lambda: False
    share, of = stats.memory_use()
    assert of == "host"
    assert 0 < share < 1


@pytest.mark.parametrize(
    ("slow_in", "chosen", "reason"),
    [
        # Rank 0 is slow in the reward, and ranks 1 and 2 wait for it in the update, and do a little more than it.
        ("reward", "0", "; the time in which a rank waited for another one does not count"),
        # All ranks wait for each other inside the update: no time shows which one is slow.
        ("update", "1", "inside a stage take equally long, so another one may be the slow one"),
    ],
)
def test_a_rank_that_waits_for_a_slow_one_is_not_the_slowest(
    made: Made, kept: dict[str, bytes], slow_in: str, chosen: str, reason: str
) -> None:
    trainer = Trainer(made(steps="9", ranks="slowest:1"))
    for number in range(1, 10):
        for rank in range(3):
            reward = 5.0 if (slow_in, rank) == ("reward", 0) else 1.1 if rank else 1.0
            took = {"reward": reward, "update": (7.0 if slow_in == "reward" else 11.0) - reward}
            ends = {"reward": reward, "update": sum(took.values())}
            entry = RankStats(
                role="actor", rank=rank, host="node1", step=number, stages={"actor": took}, ends={"actor": ends}
            )
            kept[f"told/run/rank.actor.{rank}"] = msgspec.json.encode(entry)
        trainer.step(number)
    ranks, why = trainer.captured[9]["slowest"]["actor"]
    assert ranks == chosen
    assert reason in why
