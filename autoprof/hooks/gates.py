"""Gates of hooks: if a gate is closed, the wrapper calls the user's function directly.

A gate is closed while its hook has failed too often, or while nothing uses the calls that the hook counts.
"""

from __future__ import annotations

from autoprof.base import process
from autoprof.base.originals import threading

# Failures in a row after which a hook is disabled.
FAILURES = 5
SWITCHED_OFF = f"it failed {FAILURES} times in a row and is disabled in this process"
_FAILED = "it failed too often"
_IDLE = "nothing counts"


class Gate(list[str]):
    """Reasons why the wrappers of a hook do nothing. Empty, and so false, while they work.

    It is a list because the test of a list is cheap, and it is the only object of autoprof in a wrapper's closure.
    It pickles as an empty list: a wrapper that is shipped by value must also work in a process without autoprof.
    """

    def __reduce__(self) -> tuple[type[list[str]], tuple[()]]:
        return list, ()


# Gates by hook. They must stay the same objects, since wrappers refer to them.
_gates: dict[str, Gate] = {}
_failures: dict[str, int] = {}
_groups: dict[str, set[str]] = {}
_counting: dict[str, set[object]] = {}


class _GateState(process.State):
    """Lock of the gates. `begin` opens all gates and forgets failures and groups."""

    def begin(self) -> None:
        self.lock = threading.Lock()
        for table in (_failures, _groups, _counting):
            table.clear()
        for gate in _gates.values():
            gate.clear()


_state = _GateState()


def gate(key: str) -> Gate:
    """Return the gate of the hook `key` in this process."""
    return _gates.setdefault(key, Gate())


def failed(key: str) -> bool:
    """Count a failure of the hook. Return True if it is the last allowed one, which closes the gate."""
    with _state.lock:
        _failures[key] = _failures.get(key, 0) + 1
        if _failures[key] != FAILURES:
            return False
        gate(key).append(_FAILED)
        return True


def worked(key: str) -> None:
    """Forget the failures of a hook that has worked, unless it is disabled."""
    if key in _failures:
        with _state.lock:
            if _failures.get(key, 0) < FAILURES:
                _failures.pop(key, None)


def idle_unless(group: str, key: str) -> None:
    """Close the gate of the hook `key` while nothing is `counting` for its group."""
    with _state.lock:
        keys = _groups.setdefault(group, set())
        if key not in keys:
            keys.add(key)
            if not _counting.get(group):
                gate(key).append(_IDLE)


def counting(group: str, counter: object, active: bool) -> None:
    """Register or remove an object that counts the calls of the group's hooks. Repeated calls do no harm."""
    with _state.lock:
        counters = _counting.setdefault(group, set())
        if active:
            counters.add(counter)
        else:
            counters.discard(counter)
        for key in _groups.get(group, ()):
            reasons = _gates[key]
            if counters:
                if _IDLE in reasons:
                    reasons.remove(_IDLE)
            elif _IDLE not in reasons:
                reasons.append(_IDLE)
