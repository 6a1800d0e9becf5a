"""Profile functions of the program (cProfile before Python 3.12, `sys.setprofile`) and torch's recording of stacks.

A thread has one profile function. A recording with stacks replaces the profile functions of all threads at its start.
At its end it removes them, including any that the program has set during the recording (torch 2.13).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from autoprof.base import log
from autoprof.base.originals import threading

# The type of the profile function of torch's recording.
_TORCH = "TraceContext"
ENDED_EARLY = "stack ends where the program set a profile function (cProfile, sys.setprofile)"


def without_stacks(contents: tuple[str, ...], stacks: Sequence[str] = ("stack",)) -> tuple[tuple[str, ...], str]:
    """Leave `stacks` out of the contents if the program has set a profile function. Return the rest and the reason.

    Python shows the profile function of this thread and of new threads, but not of other running threads.
    """
    left_out = [word for word in contents if word in stacks]
    found = own()
    found = threading.getprofile() if found is None else found
    if not left_out or found is None:
        return contents, ""
    name = getattr(found, "__qualname__", type(found).__qualname__)
    reason = f"{', '.join(left_out)} is left out: the program has set the profile function {name}, which torch removes"
    log.warning_once(reason)
    return tuple(word for word in contents if word not in stacks), reason


def own() -> Any:
    """Return the profile function that the program has set in this thread, if any."""
    found = sys.getprofile()
    return None if type(found).__name__ == _TORCH else found


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Set the program's profile function of this thread aside for the end of a recording with stacks."""
    found = own()
    if found is None:
        yield
        return
    sys.setprofile(None)
    try:
        yield
    finally:
        _set(found)


def _set(found: Any) -> None:
    """Set a profile function again. `enable` of cProfile keeps its counts."""
    if hasattr(found, "enable"):
        found.enable()
    elif callable(found):
        sys.setprofile(found)
    else:
        log.warning(f"the profiler {type(found).__qualname__} was ended by torch, which recorded stacks")
