"""Open blocks of a script, with the hooks behind them. These are hooks as in recipes, but wrap no function."""

from __future__ import annotations

from typing import Any

from autoprof import _boot
from autoprof.base import identity, log, seam
from autoprof.behaviours.trainer import open_step
from autoprof.hooks import dispatch, registry
from autoprof.hooks.behaviour import Outcome
from autoprof.hooks.recipe import DISABLED, BoundHook, Hook, Recipe
from autoprof.run import runtime
from autoprof.run.runtime import Runtime

_NAME = "autoprof"


class OpenBlock:
    """One `with` block, from before its begin to its end."""

    __slots__ = ("_hook_call", "_run")

    def __init__(self, hook: BoundHook, values: dict[str, Any]) -> None:
        self._run = runtime.current()
        self._hook_call = dispatch.HookCall(hook.key, _nothing, (), values)

    def enter(self) -> None:
        """Enter the block. If `enter` or `leave` is interrupted, the caller must call `undo`."""
        self._hook_call.proceed()

    def leave(self, error: BaseException | None) -> None:
        """Leave the block, with the exception that it raised, if any. If its run was stopped meanwhile, drop it."""
        if runtime.current() is self._run:
            self._hook_call.proceed(Outcome(None, error))
        else:
            self.undo()

    def undo(self) -> None:
        """End the span and the capture of the block, if they are still open: `enter` or `leave` was interrupted."""
        self._hook_call.abort(GeneratorExit())

    def __del__(self) -> None:
        self.undo()  # a signal may keep Python from calling the `__exit__` of the block


def joined() -> Runtime | None:
    """Join the run that the environment names, if any, and register the hooks of blocks. Never raises."""
    run: Runtime | None = None
    with seam.guard(_NAME, runtime.report) as root:
        run = _boot.agent().join()
        if run is not None and _STEP.key not in registry.bound:
            for hook in (_STEP, _STAGE, _STOP):
                registry.bound[hook.key] = hook
                hook.behaviour  # noqa: B018  the first call of a hook must not import its behaviour
                if run.settings.disabled(_NAME, hook.hook.name):
                    run.hooks.skipped(hook, DISABLED)
                else:
                    run.hooks.applied(hook)
    return None if root.failed else run


def step(number: int | None) -> OpenBlock | None:
    """Return the block of a step, not yet entered, or None if it has nothing to do."""
    return _open_block(_STEP, {"number": open_step.executed() + 1 if number is None else number})


def stage(name: str, role: str, rank: int | None) -> OpenBlock | None:
    """Return the block of a stage, not yet entered, or None if it has nothing to do."""
    return _open_block(_STAGE, {"name": name, "role": role, "rank": identity.own_rank() if rank is None else rank})


def warn_of_nested_step() -> None:
    """Warn that a step begins inside another step."""
    log.warning_once("a step begins inside another step and is part of it; use autoprof.stage for parts of a step")


def stop_blocks() -> None:
    """End the open step, which is the last one."""
    dispatch.drive(_STOP.key, _nothing, (), {})


def _open_block(hook: BoundHook, values: dict[str, Any]) -> OpenBlock | None:
    run = runtime.current()
    if run is None or run.settings.disabled(_NAME, hook.hook.name) or dispatch.compiling():
        return None
    return OpenBlock(hook, values)


def _nothing() -> None:
    """Do nothing. Placeholder for the code of a block, which autoprof does not call."""


def _hook(name: str, behaviour: str, **options: Any) -> BoundHook:
    hook = Hook(name=name, attribute=name, behaviour=behaviour, module=_NAME, options=options)
    return BoundHook(key=f"{_NAME}/{name}", file=_NAME, recipe=_RECIPE, hook=hook)


_RECIPE = Recipe(target=_NAME, hook=[])
_STEP = _hook("step", "step.wrap", number="number")
_STAGE = _hook("stage", "stage", stage={"path": "name"}, role={"path": "role"}, rank="rank")
_STOP = _hook("stop", "step.loop")
