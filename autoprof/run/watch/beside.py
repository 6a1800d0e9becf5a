"""Parts of a snapshot other than stacks: memory, torch's flight record, the state of an engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from autoprof.base import interrupts
from autoprof.run.watch import engine_state, flight_record, memory
from autoprof.rundir.stacks import ProcessStacks

_Found = TypeVar("_Found")


def added(taken: ProcessStacks, folder: str) -> ProcessStacks:
    """Return a snapshot with these parts added; write the flight record into the folder. Raises nothing."""
    left_out = list(taken.left_out)
    engine: engine_state.State = {}
    nothing: dict[str, int] = {}
    return msgspec.structs.replace(
        taken,
        memory=_tried("memory", lambda: memory.read(), nothing, left_out),
        engine=_tried("engine", lambda: engine_state.take(left_out), engine, left_out),
        flight_record=_tried("flight record", lambda: flight_record.write(folder), "", left_out),
        left_out=left_out,
    )


def _tried(name: str, work: Callable[[], _Found], without: _Found, left_out: list[str]) -> _Found:
    try:
        return work()
    except Exception as error:
        interrupts.pass_on(error)
        left_out.append(f"{name}: {type(error).__name__}: {error}"[:200])
        return without
