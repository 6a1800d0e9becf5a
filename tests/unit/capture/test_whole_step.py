"""Captures of whole steps and of parts of stages, with wrapped functions and the real torch.profiler."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from autoprof.behaviours import stages, steps
from autoprof.capture import whole_step
from autoprof.cli import doctor as doctor_run
from autoprof.run import cluster
from autoprof.run.runtime import Runtime
from autoprof.rundir import file_names, runs
from tests.support.captures import finished
from tests.support.helpers import TORCH, Python, in_thread


class Trainer:
    """Trainer with two roles in one process."""

    number = 0

    def __init__(self, hooked: Any) -> None:
        self.step = hooked(self._step, "step.wrap", number="number")
        self.log_prob = hooked(lambda: torch.ones(3).sin(), "stage", role="actor", stage="compute_log_prob")
        self.ref = hooked(lambda: torch.ones(3).cos(), "stage", role="ref", stage="compute_ref_log_prob")
        self.batch = hooked(lambda: torch.ones(3).exp(), "stage.mini-batch")
        self.update = hooked(self._update, "stage", role="actor", stage="update_actor", mini_batches=True)
        self.fit = hooked(self._fit, "step.loop")

    def _step(self, number: int) -> None:
        torch.ones(3).atan()
        self.log_prob()
        torch.ones(3).log()
        self.ref()
        self.update()

    def _update(self) -> None:
        for _ in range(4):
            self.batch()

    def _fit(self, numbers: list[int]) -> None:
        for number in numbers:
            self.step(number)


@pytest.fixture
def trainer(hooked: Any) -> Iterator[Trainer]:
    yield Trainer(hooked)
    assert stages.running == {}
    assert whole_step.current() is None
    cluster.announce_step("run", None)


def captures(run: Runtime) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    finished(run)
    found = {}
    for path in run.rundir.path.glob("*/*.meta.json"):
        meta = json.loads(path.read_text())
        trace = Path(str(path).replace(file_names.META, file_names.TRACE))
        found[f"{meta['step']}/{path.name.split('.rank0')[0]}"] = (
            meta,
            json.loads(gzip.decompress(trace.read_bytes())),
        )
    return found


def ranges(trace: dict[str, Any]) -> list[str]:
    """Return the ranges of a trace, from outer to inner and from first to last."""
    found = [event for event in trace["traceEvents"] if event.get("cat") == "user_annotation"]
    return [event["name"] for event in sorted(found, key=lambda event: (event["ts"], -event["dur"]))]


def operators(trace: dict[str, Any]) -> set[str]:
    return {event["name"] for event in trace["traceEvents"] if event.get("cat") == "cpu_op"}


STAGES = ["actor.compute_log_prob", "ref.compute_ref_log_prob", "actor.update_actor"]
BATCHES = [f"mini_batch {number}" for number in range(4)]


def test_a_step_is_one_capture_that_names_all_its_roles(joined: Any, trainer: Trainer) -> None:
    run = joined(steps="2", mode="continuous")
    trainer.fit([1, 2, 3])
    ((name, (meta, trace)),) = captures(run).items()
    assert name == "2/actor+ref.step"
    assert (meta["state"], meta["reason"], meta["steps"]) == ("complete", "", [2])
    assert [f"{stage['role']}.{stage['stage']}" for stage in meta["stages"]] == STAGES
    assert all(stage["start"] <= stage["stop"] for stage in meta["stages"])
    assert ranges(trace) == ["global_step 2", *STAGES, *BATCHES]
    # All operators since the first stage, also between two stages.
    assert {"aten::sin", "aten::log", "aten::cos", "aten::exp"} <= operators(trace)
    assert "aten::atan" not in operators(trace)
    assert trace["autoprof"]["global_steps"] == [2]
    assert trace["autoprof"]["role"] == "actor+ref"


def test_consecutive_steps_are_apart(joined: Any, trainer: Trainer) -> None:
    run = joined(steps="1:3", mode="continuous")
    trainer.fit([1, 2, 3])
    assert {name: meta["steps"] for name, (meta, _) in captures(run).items()} == {
        "1/actor+ref.step": [1],
        "2/actor+ref.step": [2],
    }


@pytest.mark.parametrize("executed", [[1, 2, 3, 4, 5], [1, 2, 3], [2, 3]])
def test_consecutive_steps_together(joined: Any, trainer: Trainer, executed: list[int]) -> None:
    # In the second case the run ends while the window is open.
    run = joined(steps="2:4,7:10", mode="continuous", consecutive="together")
    trainer.fit(executed)
    ((name, (meta, trace)),) = captures(run).items()
    assert name == "2/actor+ref.step"
    assert meta["steps"] == trace["autoprof"]["global_steps"] == [2, 3]
    assert ranges(trace) == ["global_step 2", *STAGES, *BATCHES, "global_step 3", *STAGES, *BATCHES]


def test_doctor_knows_where_a_step_is_that_shares_a_capture(joined: Any, trainer: Trainer) -> None:
    run = joined(steps="2:4", mode="continuous", consecutive="together")
    trainer.fit([1, 2, 3])
    finished(run)
    run._join()
    run.complete()
    assert doctor_run.examine_run(runs.read(run.rundir.path)).problems == []


def test_only_stages_of_the_windows_roles_are_ranges(joined: Any, trainer: Trainer) -> None:
    run = joined(steps="1", mode="continuous", roles=("ref",))
    trainer.fit([1])
    ((name, (_, trace)),) = captures(run).items()
    assert name == "1/ref.step"
    assert ranges(trace) == ["global_step 1", "ref.compute_ref_log_prob"]
    assert "aten::sin" not in operators(trace)


def test_a_stage_in_another_thread_than_its_step_leaves_the_capture_to_that(
    joined: Any, hooked: Any, trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    run = joined(steps="1,2", mode="continuous")
    generate = hooked(lambda: torch.ones(3).tan(), "stage", role="rollout", stage="generate")

    def both(number: int) -> None:
        in_thread(generate)
        trainer.update()

    step = hooked(both, "step.wrap", number="number")
    step(number=1)
    step(number=2)
    found = captures(run)
    assert sorted(found) == ["1/actor.step", "2/actor.step"]
    assert {meta["state"] for meta, _ in found.values()} == {"complete"}
    assert caplog.text.count("rollout generate is not recorded: it runs in another thread than its step") == 1


def test_a_stage_that_raises_truncates_the_steps_capture(joined: Any, hooked: Any) -> None:
    run = joined(steps="1", mode="continuous")

    def fail() -> None:
        raise KeyError("theirs")

    stage = hooked(fail, "stage", role="actor", stage="update_actor")
    whole = hooked(lambda number: stage(), "step.wrap", number="number")
    with pytest.raises(KeyError):
        whole(1)
    ((meta, trace),) = captures(run).values()
    assert (meta["state"], meta["reason"]) == ("truncated", "actor.update_actor: the stage raised KeyError")
    assert trace["traceEvents"]


def test_counted_passes_have_a_capture_of_their_own(joined: Any, hooked: Any) -> None:
    run = joined(steps="1", mode="continuous", rollout_iterations="0:2")
    one = hooked(lambda: torch.ones(3).tan(), "stage.pass")
    generate = hooked(lambda: [one() for _ in range(5)], "stage", role="rollout", stage="generate", passes=True)
    train = hooked(lambda: torch.ones(3).exp(), "stage", role="actor", stage="update_actor")
    hooked(lambda number: (generate(), train()), "step.wrap", number="number")(1)
    found = captures(run)
    assert sorted(found) == ["1/actor.step", "1/rollout.generate"]
    generated = [event for event in found["1/rollout.generate"][1]["traceEvents"] if event.get("name") == "aten::tan"]
    assert len(generated) == 2


@pytest.mark.parametrize(
    ("part", "recorded", "state"),
    [
        ("all", BATCHES, "complete"),
        ("0:2", BATCHES[:2], "complete"),
        ("1:3", BATCHES[1:3], "complete"),
        ("3:9", BATCHES[3:], "complete"),
        ("4:6", [], "failed"),
    ],
)
def test_mini_batches(joined: Any, trainer: Trainer, part: str, recorded: list[str], state: str) -> None:
    run = joined(steps="1", mini_batches=part)
    trainer.fit([1])
    found = {name.split(".rank0")[0]: both for name, both in finished(run).items()}
    meta, trace = found["actor.update_actor"]
    assert meta["state"] == state
    if trace is None:
        assert meta["reason"] == "there were 4 mini-batches; recording was to begin after 4"
    else:
        assert ranges(trace) == ["actor.update_actor", *recorded]
        assert sum(event["name"] == "aten::exp" for event in trace["traceEvents"]) == len(recorded)
    # A stage without mini-batches is recorded whole.
    assert found["actor.compute_log_prob"][0]["state"] == "complete"


def test_mini_batches_that_have_a_last_call(joined: Any, hooked: Any) -> None:
    run = joined(steps="1", mini_batches="1:2")
    optimizer = hooked(lambda: torch.ones(3).tan(), "stage.pass", counted="mini_batches")

    def batches() -> None:
        for _ in range(3):
            torch.ones(3).exp()
            optimizer()

    update = hooked(batches, "stage", role="actor", stage="update_actor", mini_batches=True)
    hooked(lambda number: update(), "step.wrap", number="number")(1)
    ((_, trace),) = captures(run).values()
    names = [event["name"] for event in trace["traceEvents"] if event.get("name") in ("aten::exp", "aten::tan")]
    assert names == ["aten::exp", "aten::tan"]


def test_a_trace_of_a_stage_says_what_it_is_of(joined: Any, trainer: Trainer) -> None:
    run = joined(steps="2", ranks="0")
    trainer.fit([1, 2])
    _, trace = captures(run)["2/ref.compute_ref_log_prob"]
    stamped = trace["autoprof"]
    assert {key: stamped[key] for key in ("global_step", "role", "stage", "rank", "run")} == {
        "global_step": 2,
        "role": "ref",
        "stage": "compute_ref_log_prob",
        "rank": 0,
        "run": "run",
    }
    assert stamped["versions"]["torch"] == torch.__version__
    assert ranges(trace) == ["ref.compute_ref_log_prob"]


def test_an_end_in_another_thread_says_so(joined: Any, trainer: Trainer) -> None:
    run = joined(steps="1", mode="continuous")
    cluster.announce_step("run", cluster.StepAnnouncement(step=1, captured=True))
    trainer.log_prob()
    in_thread(lambda: whole_step.step_ended(may_continue=False))
    ((meta, trace),) = finished(run).values()
    assert (meta["state"], trace) == ("failed", None)
    assert "another thread" in meta["reason"]


def test_an_actor_with_an_event_loop_is_told_in_another_thread(joined: Any, trainer: Trainer) -> None:
    # Like Ray: methods run in the thread of the event loop, other functions in another thread.
    run = joined(steps="1", mode="continuous")
    cluster.announce_step("run", cluster.StepAnnouncement(step=1, captured=True))

    async def worker() -> None:
        trainer.log_prob()
        await asyncio.to_thread(whole_step.stop_in_worker, None, False)
        await asyncio.sleep(0.01)

    asyncio.run(worker())
    ((meta, _),) = captures(run).values()
    assert (meta["state"], meta["reason"]) == ("complete", "")


def test_a_worker_that_is_not_told_ends_with_the_next_steps_first_stage(joined: Any, trainer: Trainer) -> None:
    run = joined(steps="1:3", mode="continuous")
    for number in (1, 2):
        cluster.announce_step("run", cluster.StepAnnouncement(step=number, captured=True))
        trainer.log_prob()
    whole_step.stop()
    found = captures(run)
    assert (
        found["1/actor.step"][0]["reason"]
        == "this process got no notice of the step's end; the trace ends at the next step's first stage"
    )
    assert found["2/actor.step"][0]["reason"] == ""


def test_a_process_that_ends_inside_a_step_leaves_its_capture(python: Python, tmp_path: Path) -> None:
    code = """
import sys
from autoprof.capture import whole_step
from autoprof.run import runtime
from autoprof.capture.artifacts import Subject
run = runtime.start()
leave = whole_step.enter(run, Subject(step=1, role="actor", stage="update_actor", rank=0), run.settings)
torch.ones(3).exp()
leave("")
"""
    python(TORCH + code, AUTOPROF="1", AUTOPROF_MODE="continuous", AUTOPROF_RUN_ID="made")
    run = runs.read(tmp_path / "autoprof_runs" / "made")
    deadline = 100
    while not (run.captures and run.captures[0].state == "complete") and (deadline := deadline - 1):
        threading.Event().wait(0.1)
        run = runs.read(tmp_path / "autoprof_runs" / "made")
    (capture,) = run.captures
    assert (capture.state, capture.meta.reason) == ("complete", "the process ended before the step")


class Actor:
    """Attributes of a Ray actor's handle."""

    def __init__(self) -> None:
        self.told: list[bool] = []
        self.__ray_call__ = self

    def remote(self, function: Any, together: bool) -> None:
        assert function is whole_step.stop_in_worker
        self.told.append(together)


def test_workers_are_told_that_the_step_has_ended(joined: Any, mocker: Any) -> None:
    run = joined(mode="continuous", ranks="0", role={"critic": {"ranks": "2:4"}})
    workers = [Actor() for _ in range(5)]
    call = mocker.Mock(at=lambda path, default: {"self.wg.workers": workers}.get(path, default))
    steps.note_worker(run, {}, call, ["self.wg.workers", "self.missing.workers"])
    steps.step_ended(may_continue=True)
    steps.step_ended(may_continue=False)
    steps.step_ended(may_continue=False)
    assert [worker.told for worker in workers] == [[True, False], [], [True, False], [True, False], []]


def test_workers_are_not_told_in_discrete_mode(joined: Any, mocker: Any) -> None:
    worker = Actor()
    steps.note_worker(joined(), {}, mocker.Mock(at=lambda *_: [worker]), ["self.wg.workers"])
    steps.step_ended(may_continue=False)
    assert worker.told == []
