"""The hooks of the recipes that this process has read, and the gates of these hooks.

If the gate of a hook is closed, the wrapper of the hook calls the user's function directly. A gate is closed once its
hook has failed too often in a row, and while nothing uses the calls that the hook counts.
"""

from __future__ import annotations

from autoprof import _boot
from autoprof.base import log, process
from autoprof.base.originals import os, threading
from autoprof.hooks import recipe
from autoprof.hooks.behaviour import Behaviour
from autoprof.hooks.recipe import BoundHook, Recipe, RecipeError
from autoprof.run import runtime

# Number of failures in a row after which a hook is disabled.
FAILURES = 5
SWITCHED_OFF = f"it failed {FAILURES} times in a row and is disabled in this process"
_FAILED = "it failed too often"
_IDLE = "nothing counts"


class Gate(list[str]):
    """The gate of one hook: a list with the reasons why the hook's wrappers call only the user's function.

    While the wrappers run the behaviour, the list is empty and so false.

    A gate is a list because the test of a list is cheap. It is the only object of autoprof in a wrapper's closure. A
    wrapper that is pickled by value must also work in a process without autoprof. So a gate pickles as an empty list.
    """

    def __reduce__(self) -> tuple[type[list[str]], tuple[()]]:
        return list, ()


# Hooks, by their keys.
bound: dict[str, BoundHook] = {}
# Gates, by the keys of their hooks. A gate must never be replaced by another object, because wrappers refer to it.
_gates: dict[str, Gate] = {}
# Number of failures in a row, by the keys of the hooks.
failures: dict[str, int] = {}


class _RegistryState(process.State):
    """The targets whose recipes were read, the groups of hooks that count calls, and two locks.

    Attributes:
        reading: Lock that is held while recipes are read.
        lock: Lock for the gates, the failures and the groups.
        read: Targets whose recipes this process has read.
        groups: Dict from a group to the keys of its hooks. These hooks are idle while nothing counts their calls.
        counting: Dict from a group to the objects that count the calls of the group's hooks.
    """

    def reset(self) -> None:
        self.reading = threading.RLock()
        self.lock = threading.Lock()
        self.read: set[str] = set()
        self.groups: dict[str, set[str]] = {}
        self.counting: dict[str, set[object]] = {}
        bound.clear()
        failures.clear()
        for gate in _gates.values():
            gate.clear()


_state = _RegistryState()


def left_out(run: runtime.Runtime, hook: BoundHook) -> str:
    """If a hook must not be tried in this process, return the reason. Otherwise return an empty string."""
    return hook.left_out(target_version(run, hook.recipe), run.settings)


def active(key: str) -> tuple[runtime.Runtime, Behaviour] | None:
    """Return the run and the behaviour of the hook `key`. Return None if autoprof is off or no recipe has the hook.

    If the wrapper came to this process by value, this process may not have read the recipe yet. In that case, this
    function reads the recipe.
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
    line = run.hooks.hooks.get(key)
    if line is not None and not line.called:
        run.hooks.called(key)
    return run, hook.behaviour


def read_recipes(target: str) -> list[BoundHook]:
    """Return the hooks of a target. The first call for a target reads the target's recipe files."""
    with _state.reading:
        if target not in _state.read:
            _state.read.add(target)
            for path in _boot.recipe_files().get(target, []):
                try:
                    is_own = os.path.dirname(path) == _boot.own_recipes()
                    hooks = [
                        hook for hook in recipe.load(path, check_options=not is_own) if hook.recipe.target == target
                    ]
                    bound.update({hook.key: hook for hook in hooks})
                except RecipeError as error:
                    _leave_out(os.path.basename(path), str(error))
        return [hook for hook in bound.values() if hook.recipe.target == target]


def _leave_out(recipe_name: str, problem: str) -> None:
    """Report an error in a recipe.

    Only the process that started the run prints the error, because all processes read the same files. A launcher
    prints it at its end.
    """
    run = runtime.current()
    if run is None or (run.started_here and not run.launcher()):
        log.warning_once(recipe.ignored(problem))
    if run is not None:
        run.hooks.error(recipe_name, problem)


def target_version(run: runtime.Runtime, target: Recipe) -> str:
    """Return the installed version of a recipe's target. If the version is not known, return an empty string."""
    if target.target not in run.hooks.versions:
        run.hooks.versions[target.target] = recipe.installed_version(target)
    return run.hooks.versions[target.target]


def gate(key: str) -> Gate:
    """Return the gate of the hook `key` in this process."""
    return _gates.setdefault(key, Gate())


def count_failure(key: str) -> bool:
    """Count a failure of the hook `key`. If it is failure number `FAILURES` in a row, close the gate and return True.

    Otherwise return False.
    """
    with _state.lock:
        failures[key] = failures.get(key, 0) + 1
        if failures[key] != FAILURES:
            return False
        gate(key).append(_FAILED)
        return True


def worked(key: str) -> None:
    """Reset the number of failures of a hook, because a call of the hook has worked. A disabled hook stays disabled."""
    if key in failures:
        with _state.lock:
            if failures.get(key, 0) < FAILURES:
                failures.pop(key, None)


def idle_unless(group: str, key: str) -> None:
    """Add the hook `key` to a group. Its gate is closed while no object counts for the group (`counting`)."""
    with _state.lock:
        _state.groups.setdefault(group, set()).add(key)
        _update_gates(group)


def counting(group: str, counter: object, is_counting: bool) -> None:
    """Register or remove an object that counts the calls of the group's hooks. A repeated call has no effect.

    Args:
        group: The name of the group of hooks.
        counter: The object that counts the calls.
        is_counting: True to register the object, False to remove it.
    """
    with _state.lock:
        counters = _state.counting.setdefault(group, set())
        if is_counting:
            counters.add(counter)
        else:
            counters.discard(counter)
        _update_gates(group)


def _update_gates(group: str) -> None:
    idle = [] if _state.counting.get(group) else [_IDLE]
    for key in _state.groups.get(group, ()):
        reasons = gate(key)
        reasons[:] = [reason for reason in reasons if reason != _IDLE] + idle
