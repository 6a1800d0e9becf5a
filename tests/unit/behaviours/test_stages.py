"""Stages that two calls give, names that are read from the call, and spans that are a whole: with wrapped
functions and the real torch.profiler."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from autoprof.behaviours import stages, steps
from autoprof.capture import whole_step
from autoprof.hooks import registry
from autoprof.hooks.recipe import BoundHook, Hook, Recipe
from autoprof.hooks.wrapper import wrap
from autoprof.run import cluster, runtime
from autoprof.run.runtime import Runtime
from tests.support import helpers
from tests.support.captures import finished
from tests.support.helpers import in_thread

TASK = {"stage": {"path": "self.name", "names": {"*.generate*": "generate", "*._score": "compute_log_prob"}}}


@pytest.fixture
def run(joined: Any) -> Iterator[Runtime]:
    """A process that is in step 2, which is captured."""
    made: Runtime = joined(steps="2")
    cluster.announce_step("run", cluster.StepAnnouncement(step=2, captured=True))
    yield made
    cluster.announce_step("run", None)
    assert stages.running == {}
    assert made.hooks.errors == {}


@pytest.fixture
def task(hooked: Callable[..., Any]) -> Any:
    """A context manager that has a name, as TRL's, whose two methods are hooked."""

    class Task:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> Task:
            torch.ones(2)
            return self

        def __exit__(self, *_: object) -> None:
            pass

    Task.__enter__ = hooked(Task.__enter__, "stage.begin", role="rollout", of="self", **TASK)
    Task.__exit__ = hooked(Task.__exit__, "stage.end", of="self")
    return Task


def captures(run: Runtime) -> dict[str, str]:
    """Return the state of each capture, by role and stage."""
    return {name.split(".rank0")[0]: meta["state"] for name, (meta, _) in finished(run).items()}


def spans(run: Runtime) -> list[tuple[str, str]]:
    return [(span["role"], span["name"]) for span in helpers.spans(run.rundir.path) if span["kind"] != "profiling"]


def recorded(run: Runtime, name: str) -> set[str]:
    """Return the operators in a capture's trace."""
    ((_, trace),) = [both for key, both in finished(run).items() if key.startswith(f"{name}.rank0")]
    return {event["name"] for event in trace["traceEvents"] if event.get("cat") == "cpu_op"}


def test_two_calls_give_a_stage(run: Runtime, task: Any) -> None:
    for _ in range(2):
        with task("MyTrainer.transformers.generate"):
            torch.ones(3).exp()
    assert captures(run) == {"rollout.generate": "complete", "rollout.generate.2": "complete"}
    assert "aten::exp" in recorded(run, "rollout.generate")
    assert spans(run) == [("rollout", "generate")] * 2


def test_only_names_of_the_table_are_stages(run: Runtime, task: Any) -> None:
    with task("MyTrainer.reward"), task("MyTrainer._score"), task("MyTrainer.log"):
        torch.ones(3).exp()
    assert captures(run) == {"rollout.compute_log_prob": "complete"}
    assert "aten::exp" in recorded(run, "rollout.compute_log_prob")


def test_without_a_table_all_names_are_taken(run: Runtime, hooked: Any) -> None:
    work = hooked(lambda what: torch.ones(2), "stage", role="trainer", stage={"path": "what"})
    work("this")
    work(what="that/other")
    assert captures(run) == {"trainer.this": "complete", "trainer.that-other": "complete"}


def test_a_role_is_read_alike(run: Runtime, hooked: Any) -> None:
    names = {"*GRPO*": "actor", "*": "trainer"}
    work = hooked(lambda kind: torch.ones(2), "stage", role={"path": "kind", "names": names}, stage="update")
    work("MyGRPOConfig")
    work("SFTConfig")
    assert captures(run) == {"actor.update": "complete", "trainer.update": "complete"}


def test_an_exception_inside_ends_it(run: Runtime, task: Any) -> None:
    def fails() -> None:
        with task("T.generate"):
            raise KeyError("the user's")

    with pytest.raises(KeyError, match="the user's"):
        fails()
    # The exception of the block is not an error of the hooked `__exit__`, which returned normally.
    assert captures(run) == {"rollout.generate": "complete"}


def test_a_begin_that_raises_leaves_nothing_open(run: Runtime, hooked: Any) -> None:
    def enter() -> None:
        raise ValueError("the user's")

    with pytest.raises(ValueError, match="the user's"):
        hooked(enter, "stage.begin", role="actor", stage="update_actor")()
    assert captures(run) == {"actor.update_actor": "truncated"}


def test_a_stage_without_an_end_ends_with_the_step(run: Runtime, task: Any, hooked: Any) -> None:
    begin = hooked(lambda state: None, "step.begin", number="state")
    begin(2)
    task("T.generate").__enter__()
    begin(3)
    assert stages.running == {}
    ((meta, trace),) = finished(run).values()
    assert (meta["state"], meta["reason"]) == ("truncated", "the step ended before the stage")
    assert trace is not None
    hooked(lambda: None, "step.end")()
    assert steps.state.current is None


def test_a_stage_without_an_end_ends_when_it_begins_in_a_later_step(run: Runtime, task: Any) -> None:
    task("T.generate").__enter__()
    cluster.announce_step("run", cluster.StepAnnouncement(step=3, captured=True))
    with task("T.generate"):
        pass
    finished(run)
    metas = [json.loads(path.read_text()) for path in run.rundir.path.rglob("*.meta.json")]
    states = sorted((meta["step"], meta["state"], meta["reason"]) for meta in metas)
    assert states == [(2, "truncated", "no call ended the stage"), (3, "complete", "")]


def test_an_end_closes_the_stage_of_the_same_object(run: Runtime, task: Any) -> None:
    with task("T.generate"):
        with task("U.generate"):
            pass
        torch.ones(3).exp()
    assert "aten::exp" in recorded(run, "rollout.generate")
    assert spans(run) == [("rollout", "generate")]


def test_an_end_without_a_begin_does_nothing(run: Runtime, hooked: Any) -> None:
    end = hooked(lambda: "theirs", "stage.end", stage="update_actor")
    assert end() == "theirs"
    begin = hooked(lambda: None, "stage.begin", role="actor", stage="update_critic")
    begin()
    end()
    assert list(stages.running) == [("actor", "update_critic")]
    hooked(lambda: None, "stage.end", role="actor")()
    assert captures(run) == {"actor.update_critic": "complete"}


def test_a_stage_inside_one_of_its_role_is_part_of_it(run: Runtime, hooked: Any) -> None:
    score = hooked(lambda: torch.ones(3).exp(), "stage", role="actor", stage="compute_log_prob")
    hooked(score, "stage", role="actor", stage="update_actor")()
    assert spans(run) == [("actor", "update_actor")]
    score()
    assert set(captures(run)) == {"actor.update_actor", "actor.compute_log_prob"}


def test_a_stage_inside_one_of_another_role_is_a_span_only(run: Runtime, task: Any, hooked: Any) -> None:
    reward = hooked(lambda: torch.ones(3).exp(), "stage", role="reward", stage="compute_reward")
    with task("T.generate"):
        reward()
    assert set(captures(run)) == {"rollout.generate"}
    assert spans(run) == [("reward", "compute_reward"), ("rollout", "generate")]


def test_an_outermost_stage_is_part_of_any_other(run: Runtime, hooked: Any) -> None:
    batch = hooked(lambda: torch.ones(3).exp(), "stage", role="trainer", stage="train_batch", outermost=True)
    hooked(batch, "stage", role="actor", stage="update_actor")()
    assert spans(run) == [("actor", "update_actor")]
    batch()
    assert set(captures(run)) == {"actor.update_actor", "trainer.train_batch"}


def test_an_end_in_another_thread_is_in_the_meta_file(run: Runtime, task: Any) -> None:
    opened = task("T.generate")
    opened.__enter__()
    in_thread(opened.__exit__)
    ((meta, trace),) = finished(run).values()
    assert (meta["state"], trace) == ("failed", None)
    assert meta["reason"] == "the stage ended in another thread than it began in"


def test_a_span_may_begin_and_end_by_two_calls(run: Runtime, hooked: Any) -> None:
    hooked(lambda: None, "span.begin", role="rollout", stage="generate")()
    hooked(lambda: None, "stage.end")()
    assert spans(run) == [("rollout", "generate")]
    assert captures(run) == {}


def test_calls_inside_a_span_with_whole_are_no_stages(run: Runtime, task: Any, hooked: Any) -> None:
    def evaluate() -> None:
        with task("T.generate"):
            pass

    hooked(evaluate, "span", role="trainer", stage="evaluate", whole=True)()
    assert captures(run) == {}
    assert spans(run) == [("trainer", "evaluate")]
    with task("T.generate"):
        pass
    assert captures(run) == {"rollout.generate": "complete"}


@pytest.mark.parametrize(
    ("iterations", "kept"), [("0:2", ["exp", "sin"]), ("1:3", ["sin", "cos"]), ("all", ["exp", "sin", "cos", "tan"])]
)
def test_forward_passes_are_counted(joined: Any, hooked: Any, iterations: str, kept: list[str]) -> None:
    run = joined(steps="2", rollout_iterations=iterations)
    cluster.announce_step("run", cluster.StepAnnouncement(step=2, captured=True))
    after = hooked(lambda: None, "stage.pass")

    def generate() -> None:
        for name in ("exp", "sin", "cos", "tan"):
            getattr(torch.ones(3), name)()
            after()

    hooked(generate, "stage", role="rollout", stage="generate", passes=True)()
    cluster.announce_step("run", None)
    assert captures(run) == {"rollout.generate": "complete"}
    there = recorded(run, "rollout.generate")
    assert [name for name in ("exp", "sin", "cos", "tan") if f"aten::{name}" in there] == kept
    assert len(spans(run)) == 1


def test_missing_passes_are_in_the_meta_file(joined: Any, hooked: Any) -> None:
    run = joined(steps="2", rollout_iterations="4:9")
    cluster.announce_step("run", cluster.StepAnnouncement(step=2, captured=True))
    after = hooked(lambda: None, "stage.pass")
    hooked(lambda: after(), "stage", role="rollout", stage="generate", passes=True)()
    hooked(lambda: after(), "stage", role="actor", stage="update_actor")()
    cluster.announce_step("run", None)
    assert captures(run) == {"rollout.generate": "failed", "actor.update_actor": "complete"}
    metas = {meta["stage"]: meta["reason"] for meta, _ in finished(run).values()}
    assert metas["generate"] == "there were 1 forward passes; recording was to begin after 4"


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Wraps a function with a hook of a recipe that has a kind."""

    def hook(function: Any, behaviour: str, kind: Any = None, **options: Any) -> Any:
        table = {} if kind is None else {"kind": kind}
        made = Hook(name="h", attribute="f", behaviour=behaviour, module="thing", options=options, **table)
        key = f"thing/{len(registry.bound)}"
        bound = BoundHook(key=key, file="thing", recipe=Recipe(target="thing", hook=[]), hook=made)
        monkeypatch.setitem(registry.bound, key, bound)
        monkeypatch.setattr(registry, "active", lambda key: (runtime.current(), registry.bound[key].behaviour))
        return wrap(function, key)

    return hook


def stage_kinds(run: Runtime) -> dict[str, str]:
    lines = helpers.spans(run.rundir.path)
    return {line["name"]: line.get("stage_kind", "") for line in lines if line["kind"] == "stage"}


def test_a_stage_has_the_kind_of_its_hook_in_the_timeline_and_in_the_meta_file(run: Runtime, named: Any) -> None:
    named(lambda: torch.ones(2), "stage", "update_actor", stage="polish", role="actor")()
    assert stage_kinds(run) == {"polish": "update_actor"}
    ((meta, _),) = finished(run).values()
    assert (meta["stage"], meta["stage_kind"]) == ("polish", "update_actor")


def test_a_hook_of_several_stages_has_kinds_by_patterns_and_else_by_well_known_names(run: Runtime, named: Any) -> None:
    work = named(lambda name: None, "stage", {"pol*": "update_actor"}, stage={"path": "name"}, role="actor")
    for name in ("polish", "compute_log_prob", "mine"):
        work(name)
    assert stage_kinds(run) == {"polish": "update_actor", "compute_log_prob": "log_prob", "mine": ""}


def test_spans_have_kinds_too(run: Runtime, named: Any) -> None:
    named(lambda: None, "span", "validate", stage="exam", role="trainer", whole=True)()
    assert stage_kinds(run) == {"exam": "validate"}


def test_a_kind_is_captured_where_roles_name_it(joined: Any, named: Any) -> None:
    run = joined(steps="2", roles=("update_actor", "!critic"))
    cluster.announce_step("run", cluster.StepAnnouncement(step=2, captured=True))
    named(lambda: torch.ones(2), "stage", "update_actor", stage="polish", role="actor")()
    named(lambda: torch.ones(2), "stage", "log_prob", stage="score", role="actor")()
    named(lambda: torch.ones(2), "stage", "update_actor", stage="train", role="critic")()
    cluster.announce_step("run", None)
    assert set(captures(run)) == {"actor.polish"}


def test_ranges_of_a_whole_step_have_their_kinds(joined: Any, named: Any) -> None:
    run = joined(steps="2", mode="continuous")
    cluster.announce_step("run", cluster.StepAnnouncement(step=2, captured=True))
    named(lambda: torch.ones(2), "stage", "update_actor", stage="polish", role="actor")()
    whole_step.stop()
    cluster.announce_step("run", None)
    ((meta, _),) = finished(run).values()
    assert "stage_kind" not in meta
    assert [stage["stage_kind"] for stage in meta["stages"]] == ["update_actor"]
