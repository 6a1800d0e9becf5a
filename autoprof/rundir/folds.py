"""States of a run's processes for readers: from the cache if a journal has not changed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, structs

from autoprof.rundir import cache, processes
from autoprof.rundir.cache import Stamp
from autoprof.rundir.layout import RunDir
from autoprof.rundir.processes import ProcessState
from autoprof.rundir.records import HookLine

# Name of this part of the cache.
_PART = "processes"


def read(run: Path) -> list[ProcessState]:
    """Return the last states of the processes of a run that have a journal. Skip unreadable files."""
    paths = RunDir(run).lines("journal")
    folds = _Folds(run, paths)
    states = [processes.at_present(fold, path) for path in paths if (fold := folds.of(path)) is not None]
    folds.keep()
    return processes.without_replaced(states)


class _CachedFold(Struct, array_like=True):
    """State of a process after the last line of its journal, without its hooks. Equal ranks have equal hooks."""

    stamp: Stamp
    hooks: int
    state: ProcessState


class _CachedFolds(Struct, array_like=True):
    """Part `processes` of the cache: states by the name of the journal, and the hooks by number."""

    folds: dict[str, _CachedFold]
    hooks: list[dict[str, HookLine]]


class _Folds:
    """States of the processes after the last lines of their journals, from the cache if a journal has not changed."""

    def __init__(self, run: Path, paths: Sequence[Path]) -> None:
        stamps = {path.name: cache.stamp(path) for path in paths}
        self._run = run
        self._stamps = {name: stamp for name, stamp in stamps.items() if stamp is not None}
        self._is_worth = cache.is_worth(self._stamps)
        cached = cache.get(run, _PART, _CachedFolds, _as_path) if self._is_worth else None
        self._cached = cached or _CachedFolds({}, [])
        self._new: dict[str, ProcessState] = {}
        # Equal hooks of several processes as one object.
        self._hooks: dict[tuple[int, ...], dict[str, HookLine]] = {}

    def of(self, path: Path) -> ProcessState | None:
        """Return the state of the process with this journal, as `processes.fold` does. None if it can't be read."""
        fold = self._cached.folds.get(path.name)
        if fold is not None and fold.stamp == self._stamps.get(path.name) and fold.hooks < len(self._cached.hooks):
            return structs.replace(fold.state, hooks=self._cached.hooks[fold.hooks])
        if (state := processes.fold(path)) is not None:
            state.hooks = self._hooks.setdefault(tuple(map(id, state.hooks.values())), state.hooks)
            self._new[path.name] = state
        return state

    def keep(self) -> None:
        """Write the states that were not in the cache, if there are many."""
        if not self._is_worth or len(self._new) <= len(self._stamps) // 10:
            return
        folds = {name: self._cached.folds[name] for name in self._stamps.keys() & self._cached.folds.keys()}
        hooks = self._cached.hooks
        numbers = {msgspec.msgpack.encode(each): number for number, each in enumerate(hooks)}
        for name, state in self._new.items():
            number = numbers.setdefault(msgspec.msgpack.encode(state.hooks), len(hooks))
            if number == len(hooks):
                hooks.append(state.hooks)
            if name in self._stamps:
                folds[name] = _CachedFold(self._stamps[name], number, structs.replace(state, hooks={}))
        cache.put(self._run, _PART, _CachedFolds(folds, hooks), str)


def _as_path(kind: type, value: Any) -> Any:
    return kind(value)
