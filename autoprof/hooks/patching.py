"""Application of hooks to the modules and classes of a target.

When a hook wraps a function, other modules and tables may already refer to the function. autoprof also puts the wrapper
into these modules and tables. Otherwise the function and the wrapper could not be pickled.

In files that run as `__main__`, which are scripts and modules that are started with `python -m`, a function or class is
wrapped as soon as the file defines it. No import executes such a file. So autoprof uses Python's tracing,
`sys.settrace`, to see when a name is defined. autoprof traces only the lines of the file's top level.

Tracing ends when the last hook of the file is applied. In most files, this is before the line
`if __name__ == "__main__"`. Until then, each call of a Python function in the main script's thread takes longer. Most
of these calls come from the imports of the file.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterator, Mapping
from types import CodeType, FrameType
from typing import Any

import wrapt

from autoprof import _boot
from autoprof.base import process, seam
from autoprof.base.originals import os
from autoprof.hooks import registry
from autoprof.hooks.recipe import BoundHook, outside
from autoprof.hooks.wrapper import wrap, wrapped_by, wrapper_key
from autoprof.run import runtime

_TABLES = (dict, list, OrderedDict, defaultdict)
# Types of the descriptor `__dict__` that Python itself puts into a class: for instances of the class, and for modules.
_DESCRIPTORS = (types.GetSetDescriptorType, types.MemberDescriptorType)
# Maximum number of items of a table that is searched for functions. Longer tables contain data.
MAX_TABLE_ITEMS = 10_000


def replace_in_holders(function: Any, wrapper: Any, hook: BoundHook) -> None:
    """Replace a function by its wrapper in the modules and tables that refer to the function.

    * In all modules, replace the name that the hook's attribute has. For example, `ray.init` refers to a function that
      `ray._private.worker` defines.
    * In modules of the hook's package, also replace other names of the function, and items of tables that modules,
      classes or instances contain.
    """
    package = _package(hook.hook.module)
    for key, module in list(sys.modules.items()):
        if not isinstance(module, types.ModuleType):
            continue
        names = _namespace(module)
        if _package(key) == package or key == getattr(function, "__module__", None):
            _replace_names(key, module, function, wrapper)
            for value in list(names.values()):
                _replace_items(value, package, function, wrapper)
        elif names.get(hook.hook.attribute) is function:
            setattr(module, hook.hook.attribute, wrapper)


def _replace_names(key: str, module: types.ModuleType, function: Any, wrapper: Any) -> None:
    """Replace all names of a function in a module, except names for which there is another hook.

    Args:
        key: The module's key in `sys.modules`.
        module: The module whose names are replaced.
        function: The function that the names refer to.
        wrapper: The wrapper of the function.
    """
    for name in [name for name, value in list(_namespace(module).items()) if value is function]:
        if not any((bound.hook.module, bound.hook.attribute) == (key, name) for bound in registry.bound.values()):
            setattr(module, name, wrapper)


def _replace_items(value: Any, package: str, function: Any, wrapper: Any) -> None:
    for table in _tables(value, package):
        for index, item in list(table.items() if isinstance(table, dict) else enumerate(table)):
            if item is function:
                table[index] = wrapper


def _tables(value: Any, package: str) -> Iterator[Any]:
    """Yield the value if it is a table: a dict, list or similar object that may hold hooked functions.

    If the value is a class of the package, or an object of such a class, also yield the tables in its attributes.
    """
    owner = value if issubclass(type(value), type) else type(value)
    inside = [] if _package(_namespace(owner).get("__module__")) != package else list(_namespace(value).values())
    yield from (item for item in (value, *inside) if type(item) in _TABLES and len(item) <= MAX_TABLE_ITEMS)


def _namespace(value: Any) -> Mapping[str, Any]:
    """Return the attributes of a module, a class or an instance, as a dict from name to value.

    This runs no code of the user. Such code could load a lazy module, or a property `__dict__` could raise an
    exception.
    """
    if issubclass(type(value), type):
        return type.__getattribute__(value, "__dict__")  # type: ignore[no-any-return]
    for base in type.__getattribute__(type(value), "__mro__"):
        descriptor = type.__getattribute__(base, "__dict__").get("__dict__")
        if descriptor is not None:
            return descriptor.__get__(value) if isinstance(descriptor, _DESCRIPTORS) else {}
    return {}


def _package(module: Any) -> str:
    return module.partition(".")[0] if isinstance(module, str) else ""


# Types of callables that a wrapper can replace. Functions of other compilers, which have `__code__`, can also be
# replaced. Other callables may have attributes that a wrapper does not have, and programs use classes for more than
# calls.
_FUNCTIONS = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    functools.partial,
)


def is_function(value: Any) -> bool:
    """Return True if a wrapper can replace a callable."""
    return isinstance(value, _FUNCTIONS) or hasattr(value, "__code__")


# Number of references that `_patch` counts if only one module or class refers to a function: the reference of this
# module or class, three variables, and the argument of `getrefcount`, which Python 3.14 does not count.
UNSHARED_REFERENCES = 5 if sys.version_info < (3, 14) else 4
# Types of callables that Python does not bind to the instance if they are attributes of a class.
_UNBOUND = (types.BuiltinFunctionType, types.MethodType, *([functools.partial] if sys.version_info < (3, 14) else []))


def patch_class(cls: type) -> None:
    """Apply the hooks for the methods of a class and of its base classes, before the class becomes a Ray actor.

    When a class is decorated, Ray copies all methods of the class, including inherited methods. So the hooks must be
    applied before. At that time, the import of the class's module may not have finished. The module `__main__` is never
    imported.
    """
    run = runtime.current()
    if run is None:
        return
    for owner in cls.__mro__:
        module = _main_name() if owner.__module__ == "__main__" else owner.__module__
        for hook in registry.read_recipes(module.partition(".")[0]):
            run.hooks.add(hook)
        prefix = f"{owner.__qualname__}."
        for hook in list(registry.bound.values()):
            if hook.hook.module == module and hook.hook.attribute.startswith(prefix):
                _apply_and_report(hook, owner, hook.hook.attribute.removeprefix(prefix))


def patch_main() -> None:
    """Apply the hooks for the module that runs as `__main__`. This module is never imported and is pickled by value.

    For example, a start script may define a trainer (verl 0.8.0, trainer/main_ppo_sync.py).
    """
    main = sys.modules["__main__"]
    name = _main_name()
    if runtime.current() is None or name.partition(".")[0] not in _boot.recipe_files():
        return
    for hook in registry.read_recipes(name.partition(".")[0]):
        if hook.hook.module == name:
            apply_to_module(hook, main)


def patch_again(targets: Collection[str]) -> None:
    """Apply the hooks of these targets again in imported modules, because another library has replaced functions."""
    for hook in list(registry.bound.values()):
        module = sys.modules.get(hook.hook.module)
        if module is not None and hook.recipe.target in targets:
            apply_to_module(hook, module)


def _main_name() -> str:
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return str(spec.name).removesuffix(".__main__")
    return os.path.basename(getattr(main, "__file__", "") or "").removesuffix(".py")


def apply_to_module(hook: BoundHook, module: types.ModuleType) -> None:
    """Apply a hook to its module, which was just imported or runs as `__main__`."""
    _apply_and_report(hook, module, hook.hook.attribute)


def _apply_and_report(hook: BoundHook, root: Any, path: str) -> None:
    """Apply a hook. Errors are written into the state of the hook, because an exception would end the user's import.

    Args:
        hook: The hook.
        root: The module or class from which the path begins.
        path: Path to the attribute to wrap.
    """
    run = runtime.current()
    if run is None:
        return

    def failed(key: str, error: BaseException) -> None:
        if isinstance(error, LookupError):
            run.hooks.skipped(hook, seam.text(error))
        else:
            run.hooks.failed(hook, seam.described(error))

    with seam.guard(hook.key, failed):
        if reason := registry.left_out(run, hook):
            run.hooks.skipped(hook, reason)
            return
        _patch(hook, root, path)
        if (group := hook.behaviour.idle_unless()) and not runtime.call_counts.on:
            registry.idle_unless(group, hook.key)
        run.hooks.applied(hook, outside(registry.target_version(run, hook.recipe), hook.recipe))


def owner_of(root: Any, path: str) -> tuple[Any, str, Any]:
    """Find the module or class that contains the last name of a path.

    Returns:
        The module or class, the last name of the path, and the metadata of Ray's actor class. The metadata is None for
        another class or a module.

    Raises:
        LookupError: Another name of the path than the last does not exist.
    """
    owner = root
    *parents, name = path.split(".")
    for parent in parents:
        owner = member(owner, parent)
    # Ray replaces a decorated class by an ActorClass. The methods are in a subclass of the decorated class that Ray has
    # created (Ray 2.47 to 2.60, ray/actor.py).
    metadata = getattr(owner, "__ray_metadata__", None)
    return (owner if metadata is None else metadata.modified_class), name, metadata


def _patch(hook: BoundHook, root: Any, path: str) -> None:
    owner, name, metadata = owner_of(root, path)
    is_missing = isinstance(owner, type) and not hasattr(owner, name)
    if is_missing and hook.behaviour.supply(owner, name, hook.key) and metadata is not None:
        _update_actor_methods(metadata)
    attribute = inspect.getattr_static(owner, name, None)
    if isinstance(attribute, property) and hook.key in wrapped_by(attribute.fset):
        return
    if hook.behaviour.install(member(owner, name)):
        return
    raw = inspect.getattr_static(owner, name)
    function = raw.__func__ if isinstance(raw, (staticmethod, classmethod)) else raw
    if hook.key in wrapped_by(function):
        return
    if not (is_function(function)):
        raise TypeError(f"it is a {type(function).__name__}, not a function")
    has_holders = sys.getrefcount(function) > (UNSHARED_REFERENCES if raw is function else UNSHARED_REFERENCES - 2)
    replacement = wrapped = _rewrap(function, hook) if hook.hook.rewrap else _wrap_in_layer(function, hook)
    if isinstance(raw, (staticmethod, classmethod)):
        wrapped = type(raw)(wrapped)
    elif isinstance(owner, type) and isinstance(raw, _UNBOUND):
        wrapped = staticmethod(wrapped)  # the wrapper, too, must be called without the instance
    setattr(owner, name, wrapped)
    if isinstance(owner, type):
        _hook_subclasses(owner, name, function, hook)
    is_imported = isinstance(owner, types.ModuleType) and not getattr(owner.__spec__, "_initializing", False)
    if has_holders and (is_imported or _is_found_by_pickle(hook, function)):
        replace_in_holders(function, replacement, hook)


def _is_found_by_pickle(hook: BoundHook, function: Any) -> bool:
    """Return True if `pickle` finds the function by the hook's module and attribute.

    Return False, for example, if the module has imported the function from another module.
    """
    pickled_name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    return pickled_name in ((hook.hook.module, hook.hook.attribute), ("__main__", hook.hook.attribute))


def _hook_subclasses(owner: type, name: str, function: Any, hook: BoundHook) -> None:
    """Wrap a method also in subclasses into which an earlier hook has put a wrapper of the inherited method."""
    subclasses: list[type] = type.__subclasses__(owner)
    for subclass in subclasses:
        if name not in vars(subclass):
            _hook_subclasses(subclass, name, function, hook)
            continue
        method = vars(subclass)[name]
        wraps_inherited = wrapper_key(method) is not None and _innermost(method) is _innermost(function)
        if wraps_inherited and hook.key not in wrapped_by(method):
            setattr(subclass, name, _wrap_in_layer(method, hook))


def _innermost(function: Any) -> Any:
    while wrapper_key(function) is not None:
        function = function.__wrapped__
    return function


def _update_actor_methods(metadata: Any) -> None:
    """After a method was added to an actor class, update Ray's list of its methods (Ray 2.47 to 2.60, ray/actor.py)."""
    from ray.actor import _ActorClassMethodMetadata

    _ActorClassMethodMetadata.reset_cache()
    metadata.method_meta = _ActorClassMethodMetadata.create(
        metadata.modified_class, metadata.actor_creation_function_descriptor
    )


def _wrap_in_layer(function: Any, hook: BoundHook) -> Any:
    """Return the function with the hook around it. If the function has hooks of a higher layer, they stay outside."""
    key = wrapper_key(function)
    if key is not None and _layer(key) > hook.behaviour.layer:
        return wrap(_wrap_in_layer(function.__wrapped__, hook), key, registry.bound[key].hook.around)
    if outer_keys := [key for key in wrapped_by(function) if _layer(key) > hook.behaviour.layer]:
        raise TypeError(f"it must go inside the hook {outer_keys[0]}, but another library has wrapped that one already")
    return wrap(function, hook.key, hook.hook.around)


def _layer(key: str) -> int:
    hook = registry.bound.get(key)
    return hook.behaviour.layer if hook is not None else 0


def _rewrap(function: Any, hook: BoundHook) -> Any:
    if (key := wrapper_key(function)) is not None:
        raise TypeError(f"{key} wraps it already; a hook with rewrap must be the first on its function")
    inner = getattr(function, "__wrapped__", None)
    if inner is None:
        raise LookupError(f"{hook.hook.attribute} is not decorated, but the hook has rewrap = {hook.hook.rewrap!r}")
    module, _, name = hook.hook.rewrap.rpartition(".")
    _, _, decorator = wrapt.resolve_path(module, name)
    return decorator(wrap(inner, hook.key, hook.hook.around))


def member(owner: Any, name: str) -> Any:
    """Return an attribute of a module or class.

    Raises:
        LookupError: The attribute does not exist. The message is written for users.
    """
    try:
        return getattr(owner, name)
    except AttributeError as error:
        seam.pass_on(error)
        owner_name = getattr(owner, "__qualname__", None) or getattr(owner, "__name__", repr(owner))
        raise LookupError(f"{owner_name} has no {name}") from None


_TOP_LEVEL = "<module>"
# After the trace function has seen this number of calls, check whether a hook of the file was called. If so, the work
# of the file has begun, and tracing ends.
CHECK_AFTER_CALLS = 1 << 16
# Number of calls after which the trace function is removed in any case. The imports of verl, vLLM and torch make a
# tenth of this number.
MAX_CALLS = 1 << 26


class _MainScriptState(process.State):
    """The hooks that wait until a file defines their names, and the number of calls that were traced.

    Attributes:
        waiting: Dict from a file, or a module of `python -m`, to its hooks whose names are not defined yet.
        files: All files that have or had such hooks.
        calls: Number of calls for which Python has called the trace function.
    """

    def reset(self) -> None:
        self.waiting: dict[str, list[BoundHook]] = {}
        self.files: set[str] = set()
        self.calls = 0
        if sys.gettrace() is _trace_lines:
            sys.settrace(None)


def runs_as_main(module: str) -> bool:
    """Return True if this process was started with the module (`python -m package.module`)."""
    return _boot.COMMAND.kind == "-m" and module.removesuffix(".__main__") == _boot.COMMAND.what


def watch_main(hook: BoundHook) -> None:
    """Apply a hook as soon as the script defines the hooked name: now, or while the script's top level is executed."""
    # If a debugger or a coverage tool replaces the trace function, the hook keeps this reason.
    _skip([hook], f"autoprof did not see {hook.hook.module} define it; does a debugger or a coverage tool trace it?")
    if sys.gettrace() not in (None, _trace_lines):
        return
    _state.waiting.setdefault(hook.hook.module, []).append(hook)
    _state.files.add(hook.hook.module)
    # If the script itself has started the run (`autoprof.start`), its top level is already being executed.
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if _file_of(frame) is not None:
            frame.f_trace = _trace_lines
            _apply_defined(frame)
        frame = frame.f_back
    if _state.waiting:
        sys.settrace(_trace_lines)


def _trace_lines(frame: FrameType, event: str, arg: Any) -> Any:
    """Trace the lines of a frame if the frame is the top level of a file with hooks. For `sys.settrace`."""
    try:
        if event != "call":
            return _handle_executed_lines(frame, event)
        if frame.f_code.co_name == _TOP_LEVEL and (file := _file_of(frame)) is not None:
            _leave_out_unknown(file, frame.f_code)
            return _trace_lines if file in _state.waiting else None
        _state.calls += 1
        if _state.calls % CHECK_AFTER_CALLS == 0 and (_state.calls >= MAX_CALLS or _was_called()):
            for file in list(_state.waiting):
                _give_up(file, "had not defined it when its work began")
        if not _state.waiting:
            _end(frame)
    except Exception as error:  # Python would raise it in the traced function
        seam.pass_on(error)
        runtime.report("main", error)
        _state.waiting.clear()
        _end(frame)
    return None


def _handle_executed_lines(frame: FrameType, event: str) -> Any:
    """Apply the hooks for the names that the executed lines have defined.

    Returns:
        The trace function for the next lines. None if no hook waits any more.
    """
    _apply_defined(frame)
    if event == "return" and (file := _file_of(frame)) is not None:
        _give_up(file, "was executed without defining it")
    if _state.waiting:
        return _trace_lines
    _end(frame)
    return None


def _apply_defined(frame: FrameType) -> None:
    """Apply the waiting hooks whose names the top level of the file has defined."""
    file = _file_of(frame)
    if file is None:
        return
    module = sys.modules.get(str(frame.f_globals.get("__name__")))
    if module is None or module.__dict__ is not frame.f_globals:
        return
    hooks = _state.waiting[file]
    for hook in [hook for hook in hooks if hook.hook.attribute.partition(".")[0] in frame.f_globals]:
        hooks.remove(hook)
        apply_to_module(hook, module)
    if not hooks:
        del _state.waiting[file]


def _leave_out_unknown(file: str, code: CodeType) -> None:
    """Skip hooks for names that do not occur in the top level of a file."""
    if ("*",) in code.co_consts:  # `from module import *`
        return
    hooks = _state.waiting.pop(file)
    known_hooks = [hook for hook in hooks if hook.hook.attribute.partition(".")[0] in code.co_names]
    _skip([hook for hook in hooks if hook not in known_hooks], f"{file} has no such name")
    if known_hooks:
        _state.waiting[file] = known_hooks


def _was_called() -> bool:
    """Return True if a hook of one of the files was called."""
    run = runtime.current()
    hooks = [hook.key for hook in list(registry.bound.values()) if hook.hook.module in _state.files]
    return run is None or any(run.hooks.was_called(key) for key in hooks)


def _give_up(file: str, reason: str) -> None:
    _skip(_state.waiting.pop(file), f"{file} {reason}")


def _skip(hooks: list[BoundHook], reason: str) -> None:
    if (run := runtime.current()) is not None:
        for hook in hooks:
            if not run.hooks.is_applied(hook.key):  # the program may also have imported the module, with the hook
                run.hooks.skipped(hook, reason)


def _end(frame: FrameType) -> None:
    frame.f_trace = None
    if sys.gettrace() is _trace_lines:
        sys.settrace(None)


def _file_of(frame: FrameType) -> str | None:
    """If this frame executes the top level of a file or module with waiting hooks, return its key in `waiting`.

    Otherwise return None.
    """
    code = frame.f_code
    if code.co_name != _TOP_LEVEL:
        return None
    spec = frame.f_globals.get("__spec__") if frame.f_globals.get("__name__") == "__main__" else None
    path, name = f"{os.sep}{code.co_filename}", getattr(spec, "name", None)
    return next((file for file in _state.waiting if file == name or path.endswith(f"{os.sep}{file}")), None)


_state = _MainScriptState()
