"""State of the engine in this process: what its scheduler has to do, and what room is left.

A behaviour that gets hold of a scheduler says how to read it, once; it is read when somebody asks. Nothing here keeps a
scheduler alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

from autoprof.base import interrupts, process

State: TypeAlias = "dict[str, int | float | str]"
# Reads a scheduler's state; what it can't find it adds to the list, with the reason.
Read: TypeAlias = "Callable[[Any, list[str]], State]"


class _State(process.State):
    """The scheduler of this process, and how to read it."""

    def begin(self) -> None:
        self.scheduler: weakref.ref[Any] | None = None
        self.read: Read | None = None

    def in_child(self) -> None:
        self.begin()


_state = _State()


def register(scheduler: object, read: Read) -> None:
    """Note the scheduler of this process; of several the last is told."""
    try:
        _state.scheduler, _state.read = weakref.ref(scheduler), read
    except TypeError as error:  # of a class that takes no such references
        interrupts.pass_on(error)


def take(left_out: list[str]) -> State:
    """Return the state of the engine; empty where this process has none. What is missing is added to `left_out`."""
    scheduler = _state.scheduler() if _state.scheduler is not None else None
    if scheduler is None or _state.read is None:
        return {}
    try:
        return _state.read(scheduler, left_out)
    except Exception as error:  # it changes while it is read, or is of another release
        interrupts.pass_on(error)
        left_out.append(f"engine: {type(error).__name__}: {error}"[:200])
        return {}


def part(found: State, left_out: list[str], name: str, read: Callable[[], int | float | str]) -> None:
    """Read one part of the state; another release may not have it, and it changes meanwhile."""
    try:
        found[name] = read()
    except Exception as error:
        interrupts.pass_on(error)
        left_out.append(f"engine.{name}: {type(error).__name__}: {error}"[:200])
