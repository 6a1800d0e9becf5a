"""Hooks of the recipes that this process has read."""

from __future__ import annotations

from autoprof import _boot
from autoprof.base import log, process
from autoprof.base.originals import os, threading
from autoprof.config.settings import Settings
from autoprof.hooks import recipe
from autoprof.hooks.behaviour import Behaviour
from autoprof.hooks.recipe import BoundHook, Recipe, RecipeError, fits
from autoprof.run import runtime
from autoprof.run.runtime import Runtime

DISABLED = "AUTOPROF_DISABLE names it"

# Hooks by key.
bound: dict[str, BoundHook] = {}


class _RegistryState(process.State):
    """Lock of the registry, and the targets whose recipes this process has read."""

    def begin(self) -> None:
        self.lock = threading.RLock()
        self.read: set[str] = set()
        bound.clear()


_state = _RegistryState()


def known_hooks() -> list[BoundHook]:
    """Return all hooks of the recipes that this process has read."""
    return list(bound.values())


def left_out(run: Runtime, hook: BoundHook) -> str:
    """Return why a hook is not tried in this process, or an empty string."""
    return left_out_with(target_version(run, hook.recipe), run.settings, hook)


def left_out_with(version: str, settings: Settings, hook: BoundHook) -> str:
    """Return why a hook is not tried with this version of its target, or an empty string."""
    if any(settings.disabled(name, hook.hook.name) for name in (hook.recipe.target, hook.file)):
        return DISABLED
    if not fits(version, hook.hook.versions):
        return f"{hook.recipe.target} is {version}, the hook is for {hook.hook.versions}"
    return ""


def behaviour(key: str) -> Behaviour | None:
    """Return the behaviour of the hook `key`, or None if autoprof is off or no recipe has the hook.

    This process may not have read the recipe yet if the wrapper was shipped by value; it is then read now.
    """
    hook = bound.get(key)
    run = _boot.agent().join() if hook is None else runtime.current()
    if run is None:
        return None
    if hook is None:
        for recipe_hook in read_recipes(key.partition("/")[0]):
            run.hooks.add(recipe_hook)
        hook = bound.get(key)
        if hook is None:
            return None
        run.hooks.applied(hook, "it came with a class that was pickled by value")
    run.hooks.called(key)
    return hook.behaviour


def read_recipes(target: str) -> list[BoundHook]:
    """Return the hooks of a target. Its recipe files are read on the first call."""
    with _state.lock:
        if target not in _state.read:
            _state.read.add(target)
            for path in _boot.recipe_files().get(target, []):
                try:
                    hooks = [hook for hook in recipe.load(path) if hook.recipe.target == target]
                    bound.update({hook.key: hook for hook in hooks})
                except RecipeError as error:
                    _leave_out(os.path.basename(path), str(error))
        return [hook for hook in bound.values() if hook.recipe.target == target]


def _leave_out(recipe_name: str, problem: str) -> None:
    """Report an error in a recipe. Only the process that started the run prints it, since all read the same files."""
    run = runtime.current()
    if run is None or run.started_here:
        log.warning_once(f"{problem}; autoprof ignores this recipe")
    if run is not None:
        run.hooks.error(recipe_name, problem)


def target_version(run: Runtime, target: Recipe) -> str:
    """Return the installed version of a recipe's target, or an empty string."""
    if target.target not in run.hooks.versions:
        run.hooks.versions[target.target] = recipe.installed_version(target)
    return run.hooks.versions[target.target]
