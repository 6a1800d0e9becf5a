"""Attribute paths, the only expressions that recipes have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias

import msgspec

# What options of behaviours take that name a place in a call: `self.state.global_step` begins with a parameter, `app`
# is one. `extra` tells them from other texts, for those who check a recipe.
PARAMETER = "parameter"
CallPath: TypeAlias = Annotated[
    str, msgspec.Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*(\.[^.\s]+)*$", extra={"takes": "path", PARAMETER: True})
]
Parameter: TypeAlias = Annotated[
    str, msgspec.Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", extra={"takes": "name", PARAMETER: True})
]

MISSING = object()


def follow(root: Any, path: str, default: Any = MISSING) -> Any:
    """What lies at `path` (`a.b.c`) from `root`: attributes of objects, keys of mappings.

    Raises:
        LookupError: A name is not there, and there is no `default`.
    """
    place = root
    for name in path.split("."):
        try:
            place = place[name] if isinstance(place, Mapping) else getattr(place, name)
        except (AttributeError, KeyError):
            if default is not MISSING:
                return default
            raise LookupError(f"there is no {name} (of {path}) on {type(root).__name__}") from None
    return place
