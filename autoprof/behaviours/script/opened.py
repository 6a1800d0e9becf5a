"""Open `with` blocks of a script, and the hooks whose behaviours the blocks run.

The hooks are like hooks of recipes, but they wrap no function.
"""

from __future__ import annotations

from typing import Any

from autoprof import _boot
from autoprof.base import identity, log, seam
from autoprof.behaviours.trainer import steps
from autoprof.hooks import dispatch, registry
from autoprof.hooks.behaviour import Outcome
from autoprof.hooks.recipe import DISABLED, BoundHook, Hook, Recipe
from autoprof.run import runtime
from autoprof.run.runtime import Runtime

_NAME = "autoprof"


class OpenBlock:
    """The recording of one `with` block: a hook call that begins and ends when Python enters and leaves the block."""

    __slots__ = ("_hook_call", "_run")

    def __init__(self, hook: BoundHook, values: dict[str, Any]) -> None:
        self._run = runtime.current()
        self._hook_call = dispatch.HookCall(hook.key, _nothing, (), values)

    def enter(self) -> None:
        """Enter the block. If `enter` or `leave` is interrupted, the caller must call `undo`."""
        self._hook_call.proceed()

    def leave(self, error: BaseException | None) -> None:
        """Leave the block. If the run of the block was stopped inside the block, drop the block's recording.

        Args:
            error: Exception that the block raised, if any.
        """
        if runtime.current() is self._run:
            self._hook_call.proceed(Outcome(None, error))
        else:
            self.undo()

    def undo(self) -> None:
        """End the span and the capture of the block, if an interruption of `enter` or `leave` has left them open."""
        self._hook_call.abort(GeneratorExit())

    def __del__(self) -> None:
        self.undo()  # a signal may keep Python from calling the `__exit__` of the block


def joined() -> Runtime | None:
    """Join the run that the environment names, and register the hooks of blocks. Never raise an exception.

    Return the run, or None if the environment names no run or an error has occurred.
    """
    run: Runtime | None = None
    with seam.guard(_NAME, runtime.report) as root:
        run = _boot.agent().join()
        if run is not None and _STEP.key not in registry.bound:
            for hook in (_STEP, _STAGE, _STOP):
                registry.bound[hook.key] = hook
                hook.behaviour  # noqa: B018  import the behaviour now, not in the first call of the hook
                if run.settings.disabled(_NAME, hook.hook.name):
                    run.hooks.skipped(hook, DISABLED)
                else:
                    run.hooks.applied(hook)
    return None if root.failed else run


def step(number: int | None) -> OpenBlock | None:
    """Return a block for a step, which the caller enters, or None if autoprof must not record the step."""
    return _open_block(_STEP, {"number": steps.executed() + 1 if number is None else number})


def stage(name: str, role: str, rank: int | None) -> OpenBlock | None:
    """Return a block for a stage, which the caller enters, or None if autoprof must not record the stage."""
    return _open_block(_STAGE, {"name": name, "role": role, "rank": identity.own_rank() if rank is None else rank})


def warn_of_nested_step() -> None:
    """Warn that a step begins inside another step."""
    log.warning_once("a step begins inside another step and is part of it; use autoprof.stage for parts of a step")


def stop_blocks() -> None:
    """End the open step, if any, as the last step of the run."""
    dispatch.drive(_STOP.key, _nothing, (), {})


def _open_block(hook: BoundHook, values: dict[str, Any]) -> OpenBlock | None:
    run = runtime.current()
    if run is None or run.settings.disabled(_NAME, hook.hook.name) or dispatch.compiling():
        return None
    return OpenBlock(hook, values)


def _nothing() -> None:
    """Do nothing. A hook call needs a function, but autoprof does not call the code of a `with` block."""


def _hook(name: str, behaviour: str, **options: Any) -> BoundHook:
    hook = Hook(name=name, attribute=name, behaviour=behaviour, module=_NAME, options=options)
    return BoundHook(key=f"{_NAME}/{name}", file=_NAME, recipe=_RECIPE, hook=hook)


_RECIPE = Recipe(target=_NAME, hook=[])
_STEP = _hook("step", "step.wrap", number="number")
_STAGE = _hook("stage", "stage", stage={"path": "name"}, role={"path": "role"}, rank="rank")
_STOP = _hook("stop", "step.loop")
