"""Patches a target when it is imported: its recipes, its version, its hooks, and what became of each."""

from __future__ import annotations

import atexit
import functools
import inspect
import os
import sys
import threading
from types import (
    BuiltinFunctionType,
    FunctionType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

import wrapt

from autoprof import _boot, capture, cupti, ending, gates, interrupts, log, recipe, runtime
from autoprof.behaviours import Behaviour
from autoprof.recipe import BoundHook, RecipeError
from autoprof.runtime import Runtime
from autoprof.wrapping import wrap, wrapped_by, wrapper_key

# What a wrapper can stand in for, beside functions that other compilers make. Other objects that can be called have
# attributes of their own, and classes are more than what they make.
_FUNCTIONS = (
    FunctionType,
    BuiltinFunctionType,
    MethodType,
    MethodDescriptorType,
    WrapperDescriptorType,
    functools.partial,
)
# Those that a class calls without the instance.
_UNBOUND = (BuiltinFunctionType, MethodType, *([functools.partial] if sys.version_info < (3, 14) else []))

_lock = threading.RLock()
_bound: dict[str, BoundHook] = {}
_read: set[str] = set()
_joined = False


def load(target: str) -> None:
    """Read the recipes of `target` and have each hook applied when its module is imported, or now if it was.

    A recipe that is wrong is left out: it is said once, and the others go on.
    """
    run = join()
    if run is None:
        return
    for hook in _read_recipes(target):
        run.hooks.add(hook)
        if reason := left_out(run, hook):
            run.hooks.skipped(hook, reason)
            continue
        _boot.finder().when_imported(hook.hook.module, functools.partial(_imported, hook))


def known() -> list[BoundHook]:
    """All hooks of the recipes that this process has read."""
    return list(_bound.values())


def left_out(run: Runtime, hook: BoundHook) -> str:
    """Why a hook is not even tried, or an empty text."""
    if run.settings.disabled(hook.key.partition("/")[0], hook.hook.name):
        return "AUTOPROF_DISABLE names it"
    version = run.hooks.version(hook.recipe)
    if not recipe.fits(version, hook.hook.versions):
        return f"{hook.recipe.target} is {version}, the hook is for {hook.hook.versions}"
    return ""


def behaviour(key: str) -> Behaviour | None:
    """The behaviour of the hook `key`, or None where autoprof is off or the hook is left out.

    A wrapper that came by value may be of a recipe that this process has not read yet.
    """
    run = join()
    if run is None:
        return None
    hook = _bound.get(key)
    if hook is None:
        name = key.partition("/")[0].partition(".")[0]
        for found in _read_recipes(name):
            run.hooks.add(found)
        hook = _bound.get(key)
        if hook is None:
            return None
        run.hooks.applied(hook, "it came with a class shipped by value")
    run.hooks.called(key)
    return hook.behaviour


def patch_class(cls: type) -> None:
    """Apply the hooks for methods of a class that is about to become a Ray actor.

    Ray copies the methods of a class when it is decorated, which for a class decorated where it is defined is before
    its module has been imported; and a class of `__main__` has a module that is never imported at all.
    """
    module = _module_name(cls)
    target = module.partition(".")[0]
    run = runtime.current()
    if run is None:
        return
    for hook in _read_recipes(target):
        run.hooks.add(hook)
    prefix = f"{cls.__qualname__}."
    for hook in list(_bound.values()):
        if hook.hook.module == module and hook.hook.attribute.startswith(prefix):
            _apply(hook, cls, hook.hook.attribute.removeprefix(prefix))


def patch_main() -> None:
    """Apply the hooks for the module that runs as `__main__`, which is never imported and is shipped by value.

    That is the case for a trainer in the script that starts it (verl 0.8.0, trainer/main_ppo_sync.py).
    """
    main = sys.modules["__main__"]
    name = _main_name()
    if runtime.current() is None or name.partition(".")[0] not in _boot.recipe_files():
        return
    for hook in _read_recipes(name.partition(".")[0]):
        if hook.hook.module == name:
            _imported(hook, main)


def join() -> Runtime | None:
    """Join the run, and the first time set up what lasts as long as the process."""
    global _joined
    if _joined:
        return runtime.current()
    run = runtime.start()
    with _lock:
        if run is not None and not _joined:
            capture.watch_others()
            if cupti.guard(run.settings.tool, os.environ) and run.started_here:
                log.warning(
                    f"{cupti.INJECTION} named libcupti, with which torch.profiler records no GPU activity; "
                    f"this run goes without it ({cupti.KEEP}=1 keeps it)"
                )
            if run.settings.compares:
                from autoprof import telling

                telling.attach(run)
            if run.settings.memory.oom:
                from autoprof.tools import oom

                oom.watch(run, capture.subject)
            if run.started_here:
                atexit.register(ending.end_run, run)
        _joined = True
    return run


def _read_recipes(target: str) -> list[BoundHook]:
    """The hooks of a target; its recipe files are read once."""
    with _lock:
        if target not in _read:
            _read.add(target)
            for path in _boot.recipe_files().get(target, []):
                try:
                    _bound.update({hook.key: hook for hook in recipe.load(path)})
                except RecipeError as error:
                    runtime.report(os.path.basename(path), error)
        return [hook for hook in _bound.values() if hook.recipe.target == target]


def _module_name(cls: type) -> str:
    return _main_name() if cls.__module__ == "__main__" else cls.__module__


def _main_name() -> str:
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return str(spec.name).removesuffix(".__main__")
    return os.path.basename(getattr(main, "__file__", "") or "").removesuffix(".py")


def _imported(hook: BoundHook, module: ModuleType) -> None:
    # An exception here would fail the user's import.
    try:
        _apply(hook, module, hook.hook.attribute)
    except Exception as error:
        interrupts.pass_on(error)
        runtime.report(hook.key, error)


def _apply(hook: BoundHook, root: Any, path: str) -> None:
    run = runtime.current()
    if run is None:
        return
    if reason := left_out(run, hook):
        run.hooks.skipped(hook, reason)
        return
    version = run.hooks.version(hook.recipe)
    try:
        _patch(hook, root, path)
        if group := hook.behaviour.idle_unless():
            gates.idle_unless(group, hook.key)
    except LookupError as error:
        interrupts.pass_on(error)
        run.hooks.skipped(hook, str(error.args[0]))
    except Exception as error:
        interrupts.pass_on(error)
        run.hooks.failed(hook, f"{type(error).__name__}: {error}")
    else:
        tested = recipe.fits(version, hook.recipe.versions)
        run.hooks.applied(hook, "" if tested else f"{version} is outside the recipe's range {hook.recipe.versions}")


def _patch(hook: BoundHook, root: Any, path: str) -> None:
    owner = root
    *parents, name = path.split(".")
    for parent in parents:
        owner = _member(owner, parent)
    # Ray's ActorClass stands in for the class that was decorated; the methods are on a subclass it made (Ray 2.47
    # to 2.60, ray/actor.py).
    metadata = getattr(owner, "__ray_metadata__", None)
    if metadata is not None:
        owner = metadata.modified_class
    missing = isinstance(owner, type) and not hasattr(owner, name)
    if missing and hook.behaviour.supply(owner, name, hook.key) and metadata is not None:
        _renew(metadata)
    supplied = inspect.getattr_static(owner, name, None)
    if isinstance(supplied, property) and hook.key in wrapped_by(supplied.fset):
        return
    if hook.behaviour.install(_member(owner, name)):
        return
    raw = inspect.getattr_static(owner, name)
    function = raw.__func__ if isinstance(raw, (staticmethod, classmethod)) else raw
    if hook.key in wrapped_by(function):
        return
    if not (isinstance(function, _FUNCTIONS) or hasattr(function, "__code__")):
        raise TypeError(f"it is a {type(function).__name__}, not a function")
    wrapped = _rewrapped(function, hook) if hook.hook.rewrap else _wrapped(function, hook)
    if isinstance(raw, (staticmethod, classmethod)):
        wrapped = type(raw)(wrapped)
    elif isinstance(owner, type) and isinstance(raw, _UNBOUND):
        wrapped = staticmethod(wrapped)  # it is called without the instance, as it was
    setattr(owner, name, wrapped)


def _renew(metadata: Any) -> None:
    """Have handles of an actor class know a method that it was given (Ray 2.47 to 2.60, ray/actor.py)."""
    from ray.actor import _ActorClassMethodMetadata

    _ActorClassMethodMetadata.reset_cache()
    metadata.method_meta = _ActorClassMethodMetadata.create(
        metadata.modified_class, metadata.actor_creation_function_descriptor
    )


def _wrapped(function: Any, hook: BoundHook) -> Any:
    """Put a hook around a function, but inside of the hooks of a higher layer that are around it."""
    key = wrapper_key(function)
    if key is not None and _layer(key) > hook.behaviour.layer:
        return wrap(_wrapped(function.__wrapped__, hook), key)
    if outer := [key for key in wrapped_by(function) if _layer(key) > hook.behaviour.layer]:
        raise TypeError(f"{outer[0]} has to go around it, and somebody else's wrapper is around that one")
    return wrap(function, hook.key)


def _layer(key: str) -> int:
    hook = _bound.get(key)
    return hook.behaviour.layer if hook is not None else 0


def _rewrapped(function: Any, hook: BoundHook) -> Any:
    if (key := wrapper_key(function)) is not None:
        raise TypeError(f"{key} is around it already: a hook with rewrap must be the first on its function")
    inner = getattr(function, "__wrapped__", None)
    if inner is None:
        raise LookupError(f"{hook.hook.attribute} is not decorated, but the hook has rewrap = {hook.hook.rewrap!r}")
    module, _, name = hook.hook.rewrap.rpartition(".")
    _, _, decorator = wrapt.resolve_path(module, name)
    return decorator(wrap(inner, hook.key))


def _member(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError:
        where = getattr(owner, "__qualname__", None) or getattr(owner, "__name__", repr(owner))
        raise LookupError(f"{where} has no {name}") from None
