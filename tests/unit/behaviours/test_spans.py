"""Spans of single samples: values that a recipe reads from a call, and their inheritance by a sample's tasks."""

from __future__ import annotations

import asyncio
import contextvars
import json
from collections.abc import Callable, Iterator
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from codetiming import Timer
from hypothesis import given
from hypothesis import strategies as st

from autoprof.behaviours import spans as trainer_spans
from autoprof.hooks.behaviour import Call
from autoprof.run import cluster
from autoprof.run.runtime import Runtime
from tests.support import helpers
from tests.support.helpers import in_thread

SAMPLE: dict[str, Any] = {
    "kind": "sample",
    "stage": "agent_loop",
    "role": "agent_loop",
    "step": "trajectory.step",
    "ids": {"sample": "trajectory.sample_index", "rollout": "session_id", "validate": "trajectory.validate"},
    "otherwise": {"rollout": "trajectory.rollout_n"},
}
TURN: dict[str, Any] = {
    "kind": "turn",
    "stage": "generate",
    "role": "agent_loop",
    "ids": {"request": "request_id"},
    "counts": {"prompt_tokens": "prompt_ids"},
    "result_counts": {"response_tokens": "token_ids"},
}
TOOL: dict[str, Any] = {"kind": "tool", "stage": {"path": "call.name"}, "role": "agent_loop"}


@pytest.fixture
def run(joined: Any) -> Iterator[Runtime]:
    made: Runtime = joined()
    yield made
    assert made.hooks.errors == {}


def spans(run: Runtime) -> list[dict[str, Any]]:
    run.timeline.flush()
    return helpers.spans(run.rundir.path)


@pytest.fixture
def loop(hooked: Callable[..., Any]) -> Any:
    """An agent loop like verl's: concurrent samples, each with turns and a tool, in separate tasks."""

    async def generate(request_id: str, *, prompt_ids: list[int]) -> Any:
        await asyncio.sleep(0.001)
        return SimpleNamespace(token_ids=prompt_ids * 2)

    async def call_tool(call: Any) -> str:
        await asyncio.sleep(0.001)
        if call.name == "fails":
            raise KeyError(call.name)
        return "theirs"

    generate = hooked(generate, "span", **TURN)
    call_tool = hooked(call_tool, "span", **TOOL)

    async def sample(trajectory: dict[str, Any], tools: tuple[str, ...] = ("search",), **kwargs: Any) -> str:
        number = trajectory["sample_index"]
        await generate(f"r{number}", prompt_ids=[1] * (number + 1))
        await asyncio.gather(*(call_tool(SimpleNamespace(name=name, arguments="secret")) for name in tools))
        return "answer"

    return hooked(sample, "span", **SAMPLE)


def trajectory(number: int, **values: Any) -> dict[str, Any]:
    return {"step": 3, "sample_index": number, "rollout_n": 0, "validate": False} | values


async def test_each_task_has_the_ids_and_the_step_of_its_sample(run: Runtime, loop: Any) -> None:
    samples = (loop(trajectory(n), session_id=n % 2, raw_prompt="secret") for n in range(20))
    assert await asyncio.gather(*samples) == ["answer"] * 20
    found = spans(run)
    assert "secret" not in json.dumps(found)
    assert {line["step"] for line in found} == {3}
    assert {line["rank"] for line in found} == {None}
    for number in range(20):
        ids = {"sample": number, "rollout": number % 2}
        mine = [line for line in found if line["ids"]["sample"] == number]
        assert [(line["kind"], line["name"], line["ids"]) for line in mine] == [
            ("turn", "generate", ids | {"request": f"r{number}"}),
            ("tool", "search", ids),
            ("sample", "agent_loop", ids),
        ]
        turn, tool, whole = mine
        assert turn["counts"] == {"prompt_tokens": number + 1, "response_tokens": 2 * (number + 1)}
        assert whole["start_ns"] <= turn["start_ns"] < turn["end_ns"] <= tool["start_ns"] < tool["end_ns"]
        assert tool["end_ns"] <= whole["end_ns"]


async def test_a_validation_sample_and_all_its_spans_are_marked(run: Runtime, loop: Any) -> None:
    await loop(trajectory(1, validate=True, step=-1))
    found = spans(run)
    assert [line["ids"]["validate"] for line in found] == [True] * 3
    assert [line["step"] for line in found] == [None] * 3
    assert found[-1]["ids"]["rollout"] == 0  # no session_id


def test_a_failure_inside_is_recorded_by_its_type(run: Runtime, loop: Any) -> None:
    with pytest.raises(KeyError, match="fails"):
        asyncio.run(loop(trajectory(1), ("fails",)))
    assert [line.get("error") for line in spans(run)] == [None, "KeyError", "KeyError"]


async def test_a_sample_that_is_cancelled_ends(run: Runtime, loop: Any) -> None:
    task = asyncio.create_task(loop(trajectory(1)))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    assert [(line["kind"], line["error"]) for line in spans(run)] == [
        ("turn", "CancelledError"),
        ("sample", "CancelledError"),
    ]
    assert not run.timeline.running


async def test_a_sample_leaves_no_context_behind(run: Runtime, loop: Any, hooked: Any) -> None:
    await loop(trajectory(1))
    hooked(lambda: None, "span", kind="request", stage="generate", role="rollout")()
    line = spans(run)[-1]
    assert (line["kind"], line["step"], "ids" in line) == ("request", None, False)


def test_a_function_in_a_thread_with_the_context_is_inside(run: Runtime, hooked: Any) -> None:
    score = hooked(lambda: 1.0, "span", kind="reward", stage="compute_score", role="agent_loop")

    def work(trajectory: dict[str, Any]) -> None:
        in_thread(contextvars.copy_context().run, score)

    hooked(work, "span", **SAMPLE)(trajectory(5))
    assert [line["ids"] for line in spans(run)] == [{"sample": 5, "rollout": 0}] * 2


def test_in_the_trainers_process_the_step_is_known(run: Runtime, hooked: Any) -> None:
    cluster.announce_step("run", cluster.StepAnnouncement(step=8, captured=False))
    hooked(lambda: None, "span", kind="reward", stage="compute_score", role="reward")()
    cluster.announce_step("run", None)
    assert [line["step"] for line in spans(run)] == [8]


def test_a_step_that_is_off_has_no_spans(run: Runtime, loop: Any, hooked: Any) -> None:
    async def generate() -> None:
        await asyncio.gather(*(loop(trajectory(n)) for n in range(3)))

    whole = hooked(generate, "span", stage="generate_sequences", role="agent_loop")
    cluster.announce_step("run", cluster.StepAnnouncement(step=8, captured=False, off=True))
    asyncio.run(whole())
    assert spans(run) == []
    cluster.announce_step("run", None)
    asyncio.run(whole())
    assert len(spans(run)) == 10


@pytest.mark.parametrize("broken", ["sample_index", "rollout_n", "step"])
def test_unreadable_values_are_omitted(run: Runtime, hooked: Any, broken: str) -> None:
    class Trajectory:
        step, sample_index, rollout_n, validate = 3, 1, 0, False

    def fails(self: object) -> None:
        raise RuntimeError("the user's property")

    setattr(Trajectory, broken, property(fails))
    assert hooked(lambda trajectory: "theirs", "span", **SAMPLE)(Trajectory()) == "theirs"
    (line,) = spans(run)
    assert broken.removesuffix("_index").removesuffix("_n") not in line["ids"]


def test_a_result_may_be_counted_itself(run: Runtime, hooked: Any) -> None:
    whole = TURN | {"result_counts": {"response_tokens": ""}}
    hooked(lambda request_id, prompt_ids: [1, 2, 3], "span", **whole)("r", [1])
    hooked(lambda request_id, prompt_ids: None, "span", **whole)("r", np.zeros((4, 7)))
    assert [line["counts"] for line in spans(run)] == [{"prompt_tokens": 1, "response_tokens": 3}, {"prompt_tokens": 4}]


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (([1, 2], "text"), 2),
        ([5], 5),
        ((), None),
        ("text", None),
        (([[1, 2], [], [3]], None), 3),  # the tokens of three answers
        (([[1, 2], 3], None), None),
    ],
)
def test_a_number_in_a_path_is_an_item(run: Runtime, hooked: Any, result: Any, expected: Any) -> None:
    hooked(lambda request_id, prompt_ids: result, "span", **TURN | {"result_counts": {"tokens": "0"}})("r", [1])
    (line,) = spans(run)
    assert line["counts"].get("tokens") == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (7, 7),
        (-1, -1),
        ("uid", "uid"),
        (2.5, 2.5),
        (True, True),
        (None, None),
        (np.int64(7), 7),
        (np.array(7), 7),
        (np.str_("x"), "x"),
        (np.array("uid", dtype=object), "uid"),
        (np.array({"prompt": "secret"}, dtype=object), None),
        (torch.tensor(7), 7),
        (torch.ones(2), "Tensor"),
        (torch.empty((), device="meta"), "Tensor"),
        (["a prompt"], "list"),
        ({"a": "prompt"}, "dict"),
        (Fraction(1, 3), "1/3"),
        ("x" * 500, "x" * 120),
        (10**30, None),
    ],
)
def test_a_value_becomes_a_number_or_a_short_text(value: Any, expected: Any) -> None:
    found = trainer_spans.plain(value)
    assert found == expected
    assert type(found) is type(expected)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(), st.lists))
def test_any_value_can_be_a_part_of_a_line(value: Any) -> None:
    found = trainer_spans.plain(value)
    assert found is None or isinstance(found, (str, int, float, bool))
    assert len(str(found)) <= 400


def given_positionally(first: int, /, second: int = 2, *rest: int, named: int, other: int = 4, **more: int) -> None:
    pass


@pytest.mark.parametrize(
    ("args", "kwargs", "path", "expected"),
    [
        ((1,), {"named": 3}, "first", 1),
        ((1,), {"named": 3}, "second", 2),
        ((1, 5), {"named": 3}, "second", 5),
        ((1,), {"second": 6, "named": 3}, "second", 6),
        ((1,), {"named": 3}, "named", 3),
        ((1,), {"named": 3}, "other", 4),
        ((1,), {}, "named", "none"),
        ((1, 5, 6, 7), {"named": 3}, "rest", (6, 7)),
        ((1,), {"named": 3, "any": 9}, "any", 9),
        ((1,), {"named": 3, "any": 9}, "more.any", 9),
        ((1,), {"named": 3}, "any", "none"),
    ],
)
def test_arguments_are_found_as_a_signature_would(args: Any, kwargs: Any, path: str, expected: Any) -> None:
    assert Call("key", given_positionally, args, kwargs).at(path, "none") == expected


@pytest.fixture
def timers(hooked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """codetiming's Timer with the hooks of its recipe."""
    monkeypatch.setattr(Timer, "start", hooked(Timer.start, "timer.start"))
    monkeypatch.setattr(Timer, "stop", hooked(Timer.stop, "timer.stop"))


def test_timers_of_a_step_are_its_spans(run: Runtime, timers: None) -> None:
    with Timer("step", logger=None):
        cluster.announce_step("run", cluster.StepAnnouncement(step=4, captured=False))
        with Timer("gen", logger=None), Timer("update", logger=None):
            pass
        with pytest.raises(ValueError, match="theirs"), Timer("reward", logger=None):
            raise ValueError("theirs")
        late = Timer("stop_profile", logger=None)
        late.start()
    cluster.announce_step("run", None)
    late.stop()
    found = spans(run)
    names = [line["name"] for line in found]
    assert names == ["update", "gen", "reward", "step", "stop_profile"]
    assert {(line["kind"], line["step"], line["role"]) for line in found} == {("timer", 4, "trainer")}
    assert found[3]["start_ns"] <= found[1]["start_ns"]


def test_timers_outside_a_step_or_without_a_name_are_ignored(run: Runtime, timers: None) -> None:
    with Timer("elsewhere", logger=None) as timer:
        pass
    assert timer.last >= 0
    assert "_autoprof_span" not in vars(timer)
    cluster.announce_step("run", cluster.StepAnnouncement(step=4, captured=False))
    with Timer(logger=None):
        pass
    cluster.announce_step("run", None)
    assert spans(run) == []
    assert not run.timeline.running
