"""Attribute paths, the only expressions that recipes have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias

import msgspec

from autoprof.base import interrupts

# Options of behaviours that name a place in a call: `self.state.global_step` begins with a parameter, `app` is one.
# `extra` tells them from other texts when a recipe is checked.
PARAMETER = "parameter"
CallPath: TypeAlias = Annotated[
    str, msgspec.Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*(\.[^.\s]+)*$", extra={"takes": "path", PARAMETER: True})
]
Parameter: TypeAlias = Annotated[
    str, msgspec.Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", extra={"takes": "name", PARAMETER: True})
]
# A place in something else, such as what a call returns; empty for that itself.
Path: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^([^.\s]+(\.[^.\s]+)*)?$", extra={"takes": "place"})]

MISSING = object()
# Names of Python's own that describe a value. The others lead from any object to every other.
_READABLE = ("__class__", "__name__", "__qualname__", "__module__")


def follow(root: Any, path: str, default: Any = MISSING) -> Any:
    """Return the value at `path` (`a.b.c`) from `root`: attributes of objects, keys of mappings.

    Raises:
        LookupError: A name is not there, and there is no `default`; or it is one of Python's own.
    """
    place = root
    for name in path.split("."):
        if name.startswith("__") and name not in _READABLE:
            raise LookupError(f"{name} (of {path}) belongs to Python itself and is not read")
        try:
            place = place[name] if isinstance(place, Mapping) else getattr(place, name)
        except (AttributeError, KeyError) as error:
            interrupts.pass_on(error)
            if default is not MISSING:
                return default
            raise LookupError(f"there is no {name} (of {path}) on {type(root).__name__}") from None
    return place
