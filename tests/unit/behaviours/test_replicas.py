"""Requests to engines, and their times. The trainer and its replicas are made up; they are compared
with verl's source in `test_the_made_up_replicas_look_like_verls`."""

from __future__ import annotations

import ast
import json
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pytest_mock import MockerFixture

from autoprof.behaviours import rollout, steps
from autoprof.behaviours.rollout import AroundGeneration, EndOfSampling, Replicas
from autoprof.config.settings import Settings
from autoprof.hooks.behaviour import CALL, Around, Call, Outcome, Wait
from autoprof.run import cluster, runtime
from autoprof.run.cluster import StepAnnouncement
from autoprof.rundir.layout import RunDir

SHARED = Replicas(path="self.llm_server_manager.rollout_replicas")
OWN = Replicas(path="self.standalone_server_manager.rollout_replicas", own_devices=True)


class Server:
    """A handle of a server actor that records its requests and gives the test's answer."""

    def __init__(self, log: list[tuple[str, int]], replica: int) -> None:
        self.answer: Any = {"problem": ""}
        self.start_profile = SimpleNamespace(remote=self._remote)
        self._log = log
        self._replica = replica

    def _remote(self, *, autoprof: dict[str, Any]) -> Any:
        assert autoprof.get("replica", 0) == self._replica
        self._log.append((autoprof["action"], self._replica))
        return self.answer


class Answers(Wait):
    """Replacement of RayCalls in which the references are the answers."""

    def __init__(self, references: list[Any], timeout_s: float) -> None:
        self.references = references

    def block(self) -> list[Any]:
        return self.references


@pytest.fixture
def log() -> list[tuple[str, int]]:
    return []


@pytest.fixture
def trainer(log: list[tuple[str, int]]) -> Any:
    """Return two replicas of 2 ranks on the trainer's devices, and two on other devices."""

    def replica(number: int) -> Any:
        return SimpleNamespace(replica_rank=number, world_size=2, servers=[Server(log, number)])

    return SimpleNamespace(
        global_steps=7,
        llm_server_manager=SimpleNamespace(rollout_replicas=[replica(0), replica(1)]),
        standalone_server_manager=SimpleNamespace(rollout_replicas=[replica(2), replica(3)]),
    )


@pytest.fixture
def run(mocker: MockerFixture, tmp_path: Path) -> Any:
    """A run whose settings a test may change, with the announcement and the timeline out of the way."""
    made = SimpleNamespace(
        settings=Settings(steps="7", ranks="all"),
        info=SimpleNamespace(id="run"),
        rundir=RunDir(tmp_path),
        timeline=SimpleNamespace(listener=None),
        hooks=SimpleNamespace(versions={}),
        decides=True,
    )
    mocker.patch.object(runtime, "current", return_value=made)
    mocker.patch.object(rollout, "RayCalls", Answers)
    mocker.patch.object(steps, "Span")
    mocker.patch.object(rollout, "Span")
    return made


def drive(around: Around) -> None:
    """Run a behaviour to its end; the call it goes around does nothing."""
    try:
        wait = next(around)
        while True:
            wait = around.send(Outcome(None, None) if wait is CALL else wait.block())
    except StopIteration:
        pass


def call(instance: Any = None, **arguments: Any) -> Call:
    return Call("k", lambda self, **kwargs: None, (instance,), arguments, runtime.current())


def test_engines_start_with_the_step_and_stop_by_their_devices(run: Any, trainer: Any, log: Any) -> None:
    drive(steps.StepBegin(number="self.global_steps", replicas=[SHARED, OWN]).around(call(trainer)))
    assert log == [("start", 0), ("start", 1), ("start", 2), ("start", 3)]
    log.clear()
    drive(EndOfSampling().around(call(trainer)))
    assert log == [("stop", 0), ("stop", 1)]
    drive(EndOfSampling().around(call(trainer)))
    assert len(log) == 2
    log.clear()
    drive(steps.StepEnd().around(call(trainer)))
    assert log == [("stop", 2), ("stop", 3)]


def test_engines_around_generation(run: Any, trainer: Any, log: Any) -> None:
    drive(steps.StepBegin(number="self.global_steps", replicas=[SHARED], engines="around").around(call(trainer)))
    assert log == []
    drive(AroundGeneration().around(call(trainer)))
    assert log == [("start", 0), ("start", 1), ("stop", 0), ("stop", 1)]


@pytest.mark.parametrize(("at_begin", "at_end", "told"), [(4, 5, 4), (None, 5, 5), (None, None, None)])
def test_generation_outside_the_trainers_process_belongs_to_the_open_step(
    run: Any, mocker: MockerFixture, at_begin: int | None, at_end: int | None, told: int | None
) -> None:
    announced = [step and StepAnnouncement(step=step, captured=False) for step in (at_begin, at_end)]
    mocker.patch.object(cluster, "announced_step", side_effect=announced)
    drive(AroundGeneration().around(call()))
    rollout.Span.return_value.end.assert_called_once_with(None, step=told)  # type: ignore[attr-defined]


def test_in_continuous_mode_engines_record_from_the_begin_of_the_step(run: Any, trainer: Any, log: Any) -> None:
    run.settings = Settings(steps="7:9", ranks="all", mode="continuous")
    begin = steps.StepBegin(number="self.global_steps", replicas=[SHARED, OWN], engines="around")
    drive(begin.around(call(trainer)))
    assert log == [("start", number) for number in range(4)]
    log.clear()
    drive(AroundGeneration().around(call(trainer)))
    assert log == [("stop", 0), ("stop", 1)]
    log.clear()
    # A generation that outlasts its step stops no engine of the next.
    generation = AroundGeneration().around(call(trainer))
    wait = next(generation)
    while wait is not CALL:
        wait = generation.send(wait.block())
    trainer.global_steps = 8
    drive(begin.around(call(trainer)))
    log.clear()
    with pytest.raises(StopIteration):
        generation.send(Outcome(None, None))
    assert log == []


def test_generation_leaves_engines_alone_that_record_for_the_whole_step(run: Any, trainer: Any, log: Any) -> None:
    drive(steps.StepBegin(number="self.global_steps", replicas=[OWN]).around(call(trainer)))
    log.clear()
    drive(AroundGeneration().around(call(trainer)))
    assert log == []


def test_generation_that_outlasts_its_step_stops_no_engine_of_the_next(run: Any, trainer: Any, log: Any) -> None:
    run.settings = Settings(steps="7:9", ranks="0")
    begin = steps.StepBegin(number="self.global_steps", replicas=[SHARED], engines="around")
    drive(begin.around(call(trainer)))
    generation = AroundGeneration().around(call(trainer))
    wait = next(generation)
    while wait is not CALL:
        wait = generation.send(wait.block())
    trainer.global_steps = 8
    drive(steps.StepBegin(number="self.global_steps", replicas=[SHARED]).around(call(trainer)))
    assert log == [("start", 0), ("stop", 0), ("start", 0)]
    with pytest.raises(StopIteration):
        generation.send(Outcome(None, None))
    assert len(log) == 3


def test_counted_steps_continue_from_the_resumed_step(run: Any) -> None:
    numbers = []
    for _ in range(2):
        drive(steps.StepBegin(resumed="self.resume_global_step").around(call(SimpleNamespace(resume_global_step=40))))
        assert steps.state.current is not None
        numbers.append(steps.state.current.number)
    assert numbers == [41, 42]


@pytest.mark.parametrize(
    ("ranks", "started"),
    [("0", [0]), ("3", [1]), ("0,6", [0, 3]), ("1:5", [0, 1, 2]), ("99", []), ("all", [0, 1, 2, 3])],
)
def test_the_replica_that_owns_a_rank_is_captured(run: Any, trainer: Any, log: Any, ranks: str, started: Any) -> None:
    run.settings = Settings(steps="7", ranks=ranks)
    drive(steps.StepBegin(number="self.global_steps", replicas=[SHARED, OWN]).around(call(trainer)))
    assert log == [("start", replica) for replica in started]


def test_other_steps_and_other_roles_start_nothing(run: Any, trainer: Any, log: Any) -> None:
    run.settings = Settings(steps="8", ranks="all")
    drive(steps.StepBegin(number="self.global_steps", replicas=[SHARED]).around(call(trainer)))
    run.settings = Settings(steps="7", ranks="all", roles=("*", "!rollout"))
    drive(steps.StepBegin(number="self.global_steps", replicas=[SHARED]).around(call(trainer)))
    assert log == []


def test_an_engine_that_did_not_start_is_noted_and_not_stopped(run: Any, trainer: Any, log: Any) -> None:
    first, second = (replica.servers[0] for replica in trainer.llm_server_manager.rollout_replicas)
    first.answer = RuntimeError("the actor died")
    second.answer = None  # the server's process runs without autoprof
    drive(steps.StepBegin(number="self.global_steps", replicas=[SHARED, OWN]).around(call(trainer)))
    metas = [json.loads(path.read_text()) for path in sorted(run.rundir.step(7).iterdir())]
    assert [(meta["replica"], meta["state"], meta["reason"]) for meta in metas] == [
        (0, "failed", "the engine's start failed: RuntimeError: the actor died"),
        (1, "failed", "the engine's start failed: its process runs without autoprof"),
    ]
    log.clear()
    drive(steps.StepEnd().around(call(trainer)))
    assert log == [("stop", 2), ("stop", 3)]


def test_a_node_without_an_engine_is_no_problem(run: Any, trainer: Any, log: Any) -> None:
    first, _ = (replica.servers[0] for replica in trainer.llm_server_manager.rollout_replicas)
    first.answer = {}
    drive(steps.StepBegin(number="self.global_steps", replicas=[SHARED]).around(call(trainer)))
    assert log == [("start", 0), ("start", 1)]
    assert not run.rundir.step(7).exists()


def test_tick_closes_the_step_before_and_opens_the_next(run: Any, trainer: Any, log: Any) -> None:
    tick = steps.Tick(number="self.global_steps", offset=1, replicas=[OWN])
    trainer.global_steps = 6
    drive(tick.around(call(trainer)))
    assert log == [("start", 2), ("start", 3)]
    trainer.global_steps = 7
    drive(tick.around(call(trainer)))
    assert log[2:] == [("stop", 2), ("stop", 3)]


def test_a_step_without_a_number_is_counted(run: Any, trainer: Any, log: Any) -> None:
    run.settings = Settings(steps="2", ranks="all")
    wrap = steps.Wrap(replicas=[SHARED])
    drive(wrap.around(call(trainer)))
    assert log == []
    drive(wrap.around(call(trainer)))
    assert log == [("start", 0), ("start", 1), ("stop", 0), ("stop", 1)]


@pytest.mark.needs("verl")
def test_the_made_up_replicas_look_like_verls() -> None:
    def source(module: str) -> ast.Module:
        found = find_spec("verl")
        assert found is not None
        assert found.submodule_search_locations
        return ast.parse(Path(found.submodule_search_locations[0], module).read_text())

    def attributes(tree: ast.AST) -> set[str]:
        return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}

    replica = attributes(source("workers/rollout/replica.py"))
    assert {"replica_rank", "world_size", "servers"} <= replica
    assert "rollout_replicas" in attributes(source("workers/rollout/llm_server.py"))
    assert {"llm_server_manager", "global_steps"} <= attributes(source("trainer/ppo/v1/trainer_base.py"))
    assert "standalone_server_manager" in attributes(source("trainer/ppo/v1/trainer_separate_async.py"))
    servers = source("workers/rollout/vllm_rollout/vllm_async_server.py")
    (start,) = [node for node in ast.walk(servers) if getattr(node, "name", "") == "start_profile"]
    assert isinstance(start, ast.AsyncFunctionDef)
    assert start.args.kwarg is not None


def test_a_trainer_may_keep_the_handles_of_servers_only(run: Any, log: Any) -> None:
    manager = SimpleNamespace(async_llm_servers=[Server(log, 0), Server(log, 1)], tp_size=4)
    trainer = SimpleNamespace(global_steps=7, manager=manager)
    handles = Replicas(path="self.manager.async_llm_servers", servers="replica", rank="", size="self.manager.tp_size")
    run.settings = Settings(steps="7", ranks="5")
    drive(steps.StepBegin(number="self.global_steps", replicas=[handles]).around(call(trainer)))
    assert log == [("start", 1)]


def test_an_engine_whose_stop_hangs_is_waited_for_once(run: Any, trainer: Any, log: Any, tmp_path: Path) -> None:
    run.settings = Settings(steps="7:10", ranks="all")
    begin = steps.StepBegin(number="self.global_steps", replicas=[SHARED])
    drive(begin.around(call(trainer)))
    hung = trainer.llm_server_manager.rollout_replicas[0].servers[0]
    hung.answer = TimeoutError("no answer within 60 s")
    drive(EndOfSampling().around(call(trainer)))
    drive(steps.StepEnd().around(call(trainer)))
    assert log == [("start", 0), ("start", 1), ("stop", 0), ("stop", 1)]
    note = meta(tmp_path, 7)
    assert (note["state"], note["reason"]) == (
        "failed",
        "the engine did not stop within 60 s; training continues without waiting",
    )
    log.clear()
    # The engine gets no request in the next steps until it has answered. Its own files have the other results.
    trainer.global_steps = 8
    drive(begin.around(call(trainer)))
    drive(steps.StepEnd().around(call(trainer)))
    assert log == [("start", 1), ("stop", 1)]
    assert meta(tmp_path, 8)["reason"] == "the engine has not answered since step 7"
    log.clear()
    hung.answer = {"problem": ""}
    rollout._state.late[0, 0] = rollout._state.late[0, 0]._replace(reference=hung.answer)
    trainer.global_steps = 9
    drive(begin.around(call(trainer)))
    assert log == [("start", 0), ("start", 1)]
    assert not list((tmp_path / "global_step_000007").iterdir())


def test_an_engine_that_starts_too_late_is_stopped_and_not_waited_for(run: Any, trainer: Any, log: Any) -> None:
    hung = trainer.llm_server_manager.rollout_replicas[0].servers[0]
    hung.answer = TimeoutError("no answer within 60 s")
    drive(steps.StepBegin(number="self.global_steps", replicas=[SHARED]).around(call(trainer)))
    assert log == [("start", 0), ("start", 1), ("stop", 0)]
    drive(steps.StepEnd().around(call(trainer)))
    assert log == [("start", 0), ("start", 1), ("stop", 0), ("stop", 1)]


def test_late_answers_are_collected_at_the_end_of_the_run(run: Any, trainer: Any, log: Any, tmp_path: Path) -> None:
    drive(steps.StepBegin(number="self.global_steps", replicas=[SHARED]).around(call(trainer)))
    hung = trainer.llm_server_manager.rollout_replicas[0].servers[0]
    hung.answer = TimeoutError("no answer within 60 s")
    drive(steps.StepEnd().around(call(trainer)))
    rollout._state.late[0, 0] = rollout._state.late[0, 0]._replace(reference={"problem": "the disk is full"})
    drive(steps.Loop().around(call(trainer)))
    assert rollout._state.late == {}
    assert meta(tmp_path, 7)["reason"].startswith("the engine did not stop")  # no other process has written it


def meta(folder: Path, number: int) -> Any:
    """Return the only meta file of a step."""
    (path,) = (folder / f"global_step_{number:06d}").glob("*.meta.json")
    return json.loads(path.read_text())
