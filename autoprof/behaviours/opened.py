"""Open `with` blocks of a script, and the hooks whose behaviours the blocks run.

The hooks are like hooks of recipes, but they wrap no function.
"""

from __future__ import annotations

from typing import Any

from autoprof import _boot
from autoprof.base import identity, log, seam
from autoprof.behaviours import steps
from autoprof.hooks import dispatch, registry
from autoprof.hooks.behaviour import Outcome
from autoprof.hooks.recipe import DISABLED, BoundHook, Hook, Recipe
from autoprof.run import runtime

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


def joined() -> runtime.Runtime | None:
    """Join the run that the environment names, and register the hooks of blocks. Never raise an exception.

    Return the run, or None if the environment names no run or an error has occurred.
    """
    run: runtime.Runtime | None = None
    with seam.guard(_NAME, runtime.report) as root:
        run = _boot.agent().join()
        if run is not None and _HOOKS["step"].key not in registry.bound:
            for hook in _HOOKS.values():
                registry.bound[hook.key] = hook
                hook.behaviour  # noqa: B018  import the behaviour now, not in the first call of the hook
                if run.settings.disabled(_NAME, hook.hook.name):
                    run.hooks.skipped(hook, DISABLED)
                else:
                    run.hooks.applied(hook)
    return None if root.failed else run


def open_block(name: str, values: dict[str, Any]) -> OpenBlock | None:
    """Return a block, which the caller enters, or None if autoprof must not record the block.

    Args:
        name: `step` or `stage`.
        values: Arguments of `autoprof.step` or `autoprof.stage`.
    """
    run, hook = runtime.current(), _HOOKS[name]
    if run is None or run.settings.disabled(_NAME, name) or dispatch.is_compiling():
        return None
    if name == "step" and values["number"] is None:
        values = {**values, "number": steps.state.executed + 1}
    elif name == "stage":
        if not values["name"]:
            log.warning_once('autoprof.stage needs a name; a stage without a name is recorded as "stage"')
        rank = identity.own_rank() if values["rank"] is None else values["rank"]
        values = {**values, "name": values["name"] or "stage", "rank": rank}
    return OpenBlock(hook, values)


def stop_blocks() -> None:
    """End the open step, if any, as the last step of the run."""
    dispatch.drive(_HOOKS["stop"].key, _nothing, (), {})


def _nothing() -> None:
    """Do nothing. A hook call needs a function, but autoprof does not call the code of a `with` block."""


def _hook(name: str, behaviour: str, **options: Any) -> BoundHook:
    hook = Hook(name=name, attribute=name, behaviour=behaviour, module=_NAME, options=options)
    return BoundHook(key=f"{_NAME}/{name}", file=_NAME, recipe=Recipe(target=_NAME, hook=[]), hook=hook)


_HOOKS = {
    "step": _hook("step", "step.wrap", number="number"),
    "stage": _hook("stage", "stage", stage={"path": "name"}, role={"path": "role"}, rank="rank"),
    "stop": _hook("stop", "step.loop"),
}
