"""Arguments that the installed release of a profiler accepts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any


def taken(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `arguments` that a function has parameters for."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in parameters}
