"""Replacement of a hooked function in its holders: modules and tables that had it before the hook was applied.

Hooks are applied when a module's code has run. Until then other modules may have imported a function by its name, and
tables and registries may hold it. They would keep the function without the hook. `pickle` refuses such a function, as
its module has another one under its name.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

from autoprof.base import interrupts
from autoprof.hooks import registry
from autoprof.hooks.recipe import BoundHook

_TABLES = (dict, list, OrderedDict, defaultdict)
# Longer tables hold data.
_MAX_TABLE = 10_000


def replace(function: Any, wrapper: Any, hook: BoundHook) -> None:
    """Put a wrapper in place of a function that others hold.

    In all modules this replaces the function's own name: `ray.init` is that of `ray._private.worker`. In the modules of
    the hook's package it also replaces other names, and items of tables that a module, a class or an instance has.
    """
    package = _top(hook.hook.module)
    for key, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType):
            continue
        names = _namespace(module)
        if _top(key) == package or key == getattr(function, "__module__", None):
            _replace_names(key, module, function, wrapper)
            for value in list(names.values()):
                _replace_items(value, package, function, wrapper)
        elif names.get(hook.hook.attribute) is function:
            setattr(module, hook.hook.attribute, wrapper)


def _replace_names(key: str, module: ModuleType, function: Any, wrapper: Any) -> None:
    """Replace a function's names in a module; a name with another hook gets that hook alone."""
    for name in [name for name, value in list(_namespace(module).items()) if value is function]:
        if not any((each.hook.module, each.hook.attribute) == (key, name) for each in registry.bound.values()):
            setattr(module, name, wrapper)


def _replace_items(value: Any, package: str, function: Any, wrapper: Any) -> None:
    for table in _tables(value, package):
        for place, item in list(table.items() if isinstance(table, dict) else enumerate(table)):
            if item is function:
                table[place] = wrapper


def _tables(value: Any, package: str) -> Iterator[Any]:
    """Yield a value that is a table, and the tables that it has as a class or an instance of the package."""
    owner = value if issubclass(type(value), type) else type(value)
    inside = [] if _top(_namespace(owner).get("__module__")) != package else list(_namespace(value).values())
    yield from (each for each in (value, *inside) if type(each) in _TABLES and len(each) <= _MAX_TABLE)


def _namespace(value: Any) -> Mapping[str, Any]:
    """Return the attributes of a module, a class or an instance. A lazy module is not loaded for that."""
    try:
        look = type if issubclass(type(value), type) else object
        found: Mapping[str, Any] = look.__getattribute__(value, "__dict__")
    except Exception as error:  # an instance has none, or a property that raises
        interrupts.pass_on(error)
        return {}
    return found


def _top(module: Any) -> str:
    return module.partition(".")[0] if isinstance(module, str) else ""
