"""Which wrappers have anything to do: a closed gate lets the user's function be called at once.

A gate is closed for a reason, and may be for several: a hook has failed too often, or what it counts is not counted
now.
"""

from __future__ import annotations

import threading

# A hook that failed so often, without a call in between that went well, is left alone from then on.
FAILURES = 5
_FAILED = "it failed too often"
_IDLE = "nothing counts"


class Gate(list[str]):
    """Why the wrappers of a hook do nothing; empty, and so false, while they do.

    It is all that a wrapper's closure has of autoprof's, and is a list because testing one costs next to nothing. A
    wrapper that is shipped by value must do its work in the process where it arrives, with autoprof or without: it
    finds an empty list there.
    """

    def __reduce__(self) -> tuple[type[list[str]], tuple[()]]:
        return list, ()


_lock = threading.Lock()
_gates: dict[str, Gate] = {}
_failures: dict[str, int] = {}
_groups: dict[str, set[str]] = {}
_counting: dict[str, int] = {}


def gate(key: str) -> Gate:
    """The gate of the hook `key` in this process."""
    return _gates.setdefault(key, Gate())


def failed(key: str) -> bool:
    """The hook has failed; returns whether that was once too often, and its gate is closed from now on."""
    with _lock:
        _failures[key] = _failures.get(key, 0) + 1
        if _failures[key] != FAILURES:
            return False
        gate(key).append(_FAILED)
        return True


def worked(key: str) -> None:
    """The hook has done its work."""
    if key in _failures:
        with _lock:
            if _failures.get(key, 0) < FAILURES:
                _failures.pop(key, None)


def idle_unless(group: str, key: str) -> None:
    """Close the gate of the hook `key` as long as nobody is `counting` for its group."""
    with _lock:
        keys = _groups.setdefault(group, set())
        if key not in keys:
            keys.add(key)
            if not _counting.get(group):
                gate(key).append(_IDLE)


def counting(group: str, more: int) -> None:
    """Somebody begins (`more` is 1) or ends (-1) to count what the hooks of the group tell."""
    with _lock:
        before = _counting.get(group, 0)
        _counting[group] = before + more
        if bool(before) == bool(before + more):
            return
        for key in _groups.get(group, ()):
            if more > 0:
                gate(key).remove(_IDLE)
            else:
                gate(key).append(_IDLE)
