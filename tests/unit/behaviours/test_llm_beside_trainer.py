"""vLLM's `LLM` in a trainer's process: the count of its batches, and the requests to the engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pytest_mock import MockerFixture

from autoprof.behaviours import stages, vllm
from autoprof.behaviours.rollout import Request
from autoprof.capture import recorder
from autoprof.run import cluster, runtime
from autoprof.run.cluster import StepAnnouncement


class Engine:
    """A made-up `LLMEngine` of two ranks."""

    def __init__(self) -> None:
        self.busy = False
        self.output_processor = SimpleNamespace(has_unfinished_requests=lambda: self.busy)
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=2))

    def generate(self) -> None:
        """Send two requests, and make the engine's steps until both are done."""
        offline = vllm._offline(self)
        for _ in range(2):
            offline.request(runtime.current())  # type: ignore[arg-type]
            self.busy = True
        offline.look()
        self.busy = False
        offline.look()


@pytest.fixture
def asked(mocker: MockerFixture, joined: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the list of requests to engines in this process, whose rank is 3."""
    joined(steps="1", ranks="3")
    log: list[Any] = []

    async def start(engine: Any, request: Request) -> dict[str, Any]:
        log.append((request.step, request.replica, request.rank))
        return {"problem": ""}

    async def stop(engine: Any, cut: str = "") -> dict[str, Any]:
        log.append("stop")
        return {"problem": ""}

    mocker.patch.multiple(vllm, start=start, stop=stop)
    monkeypatch.setenv("RANK", "3")
    return log


def test_batches_are_steps_without_a_trainer(asked: list[Any]) -> None:
    engine = Engine()
    engine.generate()
    engine.generate()
    assert asked == [(1, 0, 0), "stop"]


def test_an_engine_that_can_not_be_recorded_is_reported(
    asked: list[Any], mocker: MockerFixture, caplog: pytest.LogCaptureFixture
) -> None:
    mocker.patch.object(vllm, "start", side_effect=RuntimeError("no worker"))
    engine = Engine()
    engine.generate()
    engine.generate()
    assert caplog.text.count("the engine could not be recorded: RuntimeError: no worker") == 1
    assert (asked, vllm._offline(engine)._batches.count) == ([], 2)


def test_a_trainer_in_the_process_announces_the_step(asked: list[Any]) -> None:
    cluster.record_trainer()
    engine = Engine()
    engine.generate()  # before its first step
    for step in (1, 7, 8):
        cluster.announce_step("run", StepAnnouncement(step=step, captured=step == 7))
        engine.generate()
    cluster.announce_step("run", None)
    engine.generate()
    assert asked == [(7, 1, 2), "stop"]


@pytest.mark.parametrize(
    "keep",
    [
        lambda mocker: mocker.patch.dict("os.environ", RANK="2"),
        lambda mocker: mocker.patch.object(recorder, "current"),  # a stage that records contains the rollout
        lambda mocker: mocker.patch.object(stages, "wholes", [object()]),
    ],
    ids=["another rank", "a recording stage", "an evaluation"],
)
def test_what_is_not_recorded_as_a_rollout(asked: list[Any], mocker: MockerFixture, keep: Any) -> None:
    cluster.announce_step("run", StepAnnouncement(step=7, captured=True))
    keep(mocker)
    Engine().generate()
    assert asked == []
