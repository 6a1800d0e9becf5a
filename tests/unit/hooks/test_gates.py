"""Hooks that have nothing to do, and hooks that are disabled because they fail."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from pytest_mock import MockerFixture

from autoprof.behaviours import stages
from autoprof.behaviours.stages import Stage, StagePass
from autoprof.capture import recorder
from autoprof.hooks import dispatch, registry
from autoprof.hooks.behaviour import CALL, Around, Behaviour, Call
from autoprof.hooks.wrapper import wrap, wrapped_by
from autoprof.run import cluster, runtime
from autoprof.run.cluster import StepAnnouncement
from tests.support.captures import finished
from tests.support.helpers import processes_of
from tests.support.recipe_texts import recipe


class Failing(Behaviour):
    """Behaviour that fails before or after a call, depending on the call's argument."""

    def around(self, call: Call) -> Around:
        if call.args[0] == "before":
            raise RuntimeError("ours")
        yield CALL
        if call.args[0] == "after":
            raise RuntimeError("ours")
        return None


@pytest.fixture
def failing(mocker: MockerFixture) -> Any:
    """Return a wrapped function with a failing behaviour, and a mock that counts its calls."""
    return mocker.patch.object(registry, "active", return_value=(None, Failing()))


@pytest.mark.fault("a hook fails again and again", "goes on", "its captures; it is switched off and said")
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_hook_that_fails_repeatedly_is_disabled(joined: Any, failing: Any, when: str, caplog: Any) -> None:
    run = joined()
    function = wrap(lambda value: value, "target/hook")
    assert [function(when) for _ in range(registry.FAILURES + 3)] == [when] * (registry.FAILURES + 3)
    assert failing.call_count == registry.FAILURES
    assert caplog.text.count("is disabled") == 1
    assert run.hooks.errors["target/hook"].count == registry.FAILURES


def test_a_successful_call_resets_the_count(joined: Any, failing: Any) -> None:
    joined()
    function = wrap(lambda value: value, "target/hook")
    for _ in range(registry.FAILURES):
        for value in ["after"] * (registry.FAILURES - 1) + ["well"]:
            assert function(value) == value
    assert not registry.gate("target/hook")


def test_the_hook_of_a_coroutine_function_is_disabled_too(joined: Any, failing: Any) -> None:
    joined()

    async def function(value: str) -> str:
        return value

    wrapped = wrap(function, "target/hook")

    async def calls() -> list[str]:
        return [await wrapped("before") for _ in range(registry.FAILURES + 3)]

    assert asyncio.run(calls()) == ["before"] * (registry.FAILURES + 3)
    assert failing.call_count == registry.FAILURES


def test_the_timeline_names_disabled_hooks(python: Any, tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "toy.py").write_text("class Trainer:\n    def step(self, number):\n        return number\n")
    step = ("step", "Trainer.step", "step.wrap", 'number = "self.no_such_thing"')
    (tmp_path / "toy.toml").write_text(recipe("toy", step))
    code = "import toy; t = toy.Trainer(); print([t.step(n) for n in range(9)])"
    result = python(code, AUTOPROF="1", AUTOPROF_RECIPES="toy.toml", PYTHONPATH="lib")
    assert result.stdout.strip() == "[0, 1, 2, 3, 4, 5, 6, 7, 8]"
    (process,) = processes_of(tmp_path / "autoprof_runs" / "latest")
    reason = f"it failed {registry.FAILURES} times in a row and is disabled in this process"
    assert process["hooks"]["toy/step"] == {
        "module": "toy",
        "attribute": "Trainer.step",
        "behaviour": "step.wrap",
        "state": "failed",
        "reason": reason,
        "called": True,
    }
    assert f"toy/step: {reason}" in result.stderr


class Half(Stage):
    """Behaviour that begins a recording and fails before it ends it."""

    def around(self, call: Call) -> Around:
        whole = super().around(call)
        wait = next(whole)
        while wait is not CALL:
            wait = whole.send((yield wait))
        yield CALL
        self.kept = whole
        raise RuntimeError("ours")


@pytest.fixture
def posted() -> Iterator[None]:
    cluster.announce_step("run", StepAnnouncement(step=1, captured=True))
    yield
    cluster.announce_step("run", None)


def test_a_failing_hooks_recording_is_ended(joined: Any, posted: None, mocker: MockerFixture) -> None:
    run = joined(steps="1")

    class Kept(Half, kw_only=True):
        kept: Any = None

    mocker.patch.object(registry, "active", return_value=(runtime.current(), Kept(role="actor", stage="update_actor")))
    wrap(lambda: torch.ones(3).sin(), "target/hook")()
    assert recorder.current() is None
    assert not torch.autograd._profiler_enabled()
    finished(run)
    (path,) = run.rundir.path.glob("*/*.meta.json")
    meta = json.loads(path.read_text())
    assert (meta["state"], meta["reason"]) == ("truncated", "autoprof failed in target/hook")
    stages.running.clear()


def test_a_pass_hook_does_nothing_while_no_stage_counts(joined: Any, hooked: Any, posted: None, mocker: Any) -> None:
    joined(steps="1")
    each = hooked(lambda: None, "stage.pass")
    driven = mocker.spy(dispatch, "drive")
    (key,) = wrapped_by(each)
    registry.idle_unless("passes", key)
    each()
    assert driven.call_count == 0
    stage = hooked(each, "stage", role="rollout", stage="generate", passes=True)
    stage()
    assert driven.call_count == 2
    each()
    assert driven.call_count == 2


def test_only_behaviours_that_count_are_ever_idle() -> None:
    assert (StagePass().idle_unless(), Stage(role="a", stage="b").idle_unless()) == ("passes", "")


def test_each_reason_of_a_closed_gate_is_removed_separately(joined: Any) -> None:
    joined()
    registry.idle_unless("group", "key")
    for _ in range(registry.FAILURES):
        registry.count_failure("key")
    registry.counting("group", 1, True)
    assert registry.gate("key") == [registry._FAILED]
    registry.counting("group", 2, True)
    registry.counting("group", 2, True)
    registry.counting("group", 2, False)
    assert registry.gate("key") == [registry._FAILED]
    registry.counting("group", 1, False)
    assert len(registry.gate("key")) == 2


def test_a_gate_that_is_shipped_by_value_arrives_open() -> None:
    registry.gate("key").append("closed here")
    there = cloudpickle.loads(cloudpickle.dumps(registry.gate("key")))
    assert (type(there), there) == (list, [])
