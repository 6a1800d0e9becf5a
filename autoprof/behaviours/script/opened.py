"""Blocks that were entered, and the hooks behind them: those of recipes, without a function that is wrapped."""

from __future__ import annotations

from typing import Any

from autoprof import _boot
from autoprof.base import identity, interrupts, log
from autoprof.behaviours.trainer import open_step, stages, steps
from autoprof.hooks import dispatch, registry
from autoprof.hooks.behaviour import Behaviour, Call, Outcome
from autoprof.hooks.recipe import BoundHook, Hook, Recipe
from autoprof.run import runtime
from autoprof.run.runtime import Runtime

_NAME = "autoprof"


class Opened:
    """A block that is being entered, or was."""

    __slots__ = ("_call", "_driven", "_run")

    def __init__(self, hook: BoundHook, values: dict[str, Any]) -> None:
        self._run = runtime.current()
        self._call = Call(hook.key, _nothing, (), values)
        self._driven = dispatch.HookCall(hook.key)

    def enter(self) -> None:
        """Enter the block. Who is interrupted in this, or in `leave`, calls `undo`."""
        self._driven.enter(self._call)

    def leave(self, error: BaseException | None) -> None:
        """Leave the block, with the exception that it raised. Nothing is left of it where its run was stopped."""
        if runtime.current() is self._run:
            self._driven.leave(Outcome(None, error))
        else:
            self._driven.give_up()

    def undo(self, error: BaseException) -> None:
        """End what is left of the block, if `error` interrupted autoprof in it."""
        self._driven.undo(error)


def joined() -> Runtime | None:
    """Join the run that the environment names, and have the hooks of blocks known in this process. Raises nothing."""
    try:
        run: Runtime | None = _boot.agent().join()
        if run is not None and _STEP.key not in registry.bound:
            for hook in (_STEP, _STAGE, _STOP):
                registry.bound[hook.key] = hook
                if run.settings.disabled(_NAME, hook.hook.name):
                    run.hooks.skipped(hook, "AUTOPROF_DISABLE names it")
                else:
                    run.hooks.applied(hook)
        return run
    except Exception as error:
        interrupts.pass_on(error)
        runtime.report(_NAME, error)
        return None


def step(number: int | None) -> Opened | None:
    """Return the block of a step, which is not entered yet."""
    return _opened(_STEP, {"number": open_step.executed() + 1 if number is None else number})


def stage(name: str, role: str, rank: int | None) -> Opened | None:
    """Return the block of a stage, which is not entered yet."""
    return _opened(_STAGE, {"name": name, "role": role, "rank": identity.own_rank() if rank is None else rank})


def nested() -> None:
    """Say that a step begins in a step."""
    log.warning_once("a step begins inside of a step and is part of it; autoprof.stage is for parts of a step")


def stop_blocks() -> None:
    """End the step that is going on: no step follows."""
    dispatch.drive(_STOP.key, _nothing, (), {})


def _opened(hook: BoundHook, values: dict[str, Any]) -> Opened | None:
    run = runtime.current()
    if run is None or run.settings.disabled(_NAME, hook.hook.name) or dispatch.compiling():
        return None
    return Opened(hook, values)


def _nothing() -> None:
    """Stand for the code of a block, which autoprof does not call."""


def _hook(name: str, kind: str, behaviour: Behaviour) -> BoundHook:
    hook = Hook(name=name, attribute=name, behaviour=kind, module=_NAME)
    return BoundHook(key=f"{_NAME}/{name}", file=_NAME, recipe=_RECIPE, hook=hook, behaviour=behaviour)


_RECIPE = Recipe(target=_NAME, hook=[])
_STEP = _hook("step", "step.wrap", steps.Wrap(number="number"))
_STAGE = _hook(
    "stage", "stage", stages.Stage(stage=stages.Read(path="name"), role=stages.Read(path="role"), rank="rank")
)
_STOP = _hook("stop", "step.loop", steps.Loop())
