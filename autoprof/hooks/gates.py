"""Gates of the wrappers: a closed one has the user's function called at once.

A gate is closed for one reason or several: its hook has failed too often, or counts for nobody now.
"""

from __future__ import annotations

from autoprof.base import process
from autoprof.base.originals import threading

# A hook that fails this often in a row is disabled from then on.
FAILURES = 5
SWITCHED_OFF = f"it failed {FAILURES} times in a row and is disabled in this process"
_FAILED = "it failed too often"
_IDLE = "nothing counts"


class Gate(list[str]):
    """The reasons for which the wrappers of a hook do nothing; empty, and so false, while they work.

    It is the one object of autoprof's in a wrapper's closure, and is a list because testing one costs next to nothing.
    A wrapper that is shipped by value must work in the process where it arrives, with autoprof or without: it finds an
    empty list there.
    """

    def __reduce__(self) -> tuple[type[list[str]], tuple[()]]:
        return list, ()


# Each call of a hook looks into these. Gates stay the same objects: wrappers have them.
_gates: dict[str, Gate] = {}
_failures: dict[str, int] = {}
_groups: dict[str, set[str]] = {}
_counting: dict[str, set[object]] = {}


class _State(process.State):
    """The lock and the content of the gates."""

    def begin(self) -> None:
        self.lock = threading.Lock()
        for known in (_failures, _groups, _counting):
            known.clear()
        for gate in _gates.values():
            gate.clear()

    def in_child(self) -> None:
        self.lock = threading.Lock()


_state = _State()


def gate(key: str) -> Gate:
    """Return the gate of the hook `key` in this process."""
    return _gates.setdefault(key, Gate())


def failed(key: str) -> bool:
    """Count a failure of the hook; return whether that was one too many, and its gate is closed from now on."""
    with _state.lock:
        _failures[key] = _failures.get(key, 0) + 1
        if _failures[key] != FAILURES:
            return False
        gate(key).append(_FAILED)
        return True


def worked(key: str) -> None:
    """Forget the failures of a hook that has done its work."""
    if key in _failures:
        with _state.lock:
            if _failures.get(key, 0) < FAILURES:
                _failures.pop(key, None)


def idle_unless(group: str, key: str) -> None:
    """Close the gate of the hook `key` as long as nothing is `counting` for its group."""
    with _state.lock:
        keys = _groups.setdefault(group, set())
        if key not in keys:
            keys.add(key)
            if not _counting.get(group):
                gate(key).append(_IDLE)


def counting(group: str, who: object, now: bool) -> None:
    """Note that `who` counts the calls of the group's hooks from now on, or no longer. May be called again."""
    with _state.lock:
        those = _counting.setdefault(group, set())
        if now:
            those.add(who)
        else:
            those.discard(who)
        for key in _groups.get(group, ()):
            closed = _gates[key]
            if those:
                if _IDLE in closed:
                    closed.remove(_IDLE)
            elif _IDLE not in closed:
                closed.append(_IDLE)
