"""Reader of the last states of a run's processes, which uses the cache for each journal that has not changed."""

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

# Name of the part of the cache with the states of processes.
_PART = "processes"


def read(run: Path) -> list[ProcessState]:
    """Return the last states of the processes of a run that have a journal. Skip journals that can't be read."""
    paths = RunDir(run).lines("journal")
    folds = _Folds(run, paths)
    states = [processes.at_present(fold, path) for path in paths if (fold := folds.of(path)) is not None]
    folds.keep()
    return processes.without_replaced(states)


class _CachedFold(Struct, array_like=True):
    """State of a process after the last line of its journal.

    Attributes:
        stamp: The inode, size and time of change of the journal.
        hooks: The index of the process's hooks in `_CachedFolds.hooks`.
        state: The state, without the hooks. Similar ranks have equal hooks, so they are stored once.
    """

    stamp: Stamp
    hooks: int
    state: ProcessState


class _CachedFolds(Struct, array_like=True):
    """The part `processes` of the cache.

    Attributes:
        folds: Dict from the name of a journal to the state of its process.
        hooks: The different dicts of hooks. `_CachedFold.hooks` is an index of this list.
    """

    folds: dict[str, _CachedFold]
    hooks: list[dict[str, HookLine]]


class _Folds:
    """The states of the processes after the last lines of their journals.

    The state of a process comes from the cache if its journal has not changed. Otherwise the journal is read.
    """

    def __init__(self, run: Path, paths: Sequence[Path]) -> None:
        stamps = {path.name: cache.stamp(path) for path in paths}
        self._run = run
        self._stamps = {name: stamp for name, stamp in stamps.items() if stamp is not None}
        self._is_worth = cache.is_worth(self._stamps)
        cached = cache.get(run, _PART, _CachedFolds, _as_path) if self._is_worth else None
        self._cached = cached or _CachedFolds({}, [])
        self._new: dict[str, ProcessState] = {}
        # The dicts of hooks that were read, by the ids of their lines. Processes with equal hooks share one dict.
        self._hooks: dict[tuple[int, ...], dict[str, HookLine]] = {}

    def of(self, path: Path) -> ProcessState | None:
        """Return the state of the process that wrote the journal `path`, as `processes.fold` does.

        Return None if the journal can't be read.
        """
        fold = self._cached.folds.get(path.name)
        if fold is not None and fold.stamp == self._stamps.get(path.name) and fold.hooks < len(self._cached.hooks):
            return structs.replace(fold.state, hooks=self._cached.hooks[fold.hooks])
        if (state := processes.fold(path)) is not None:
            state.hooks = self._hooks.setdefault(tuple(map(id, state.hooks.values())), state.hooks)
            self._new[path.name] = state
        return state

    def keep(self) -> None:
        """Write the cache again if more than a tenth of the states were not in the cache."""
        if not self._is_worth or len(self._new) <= len(self._stamps) // 10:
            return
        folds = {name: self._cached.folds[name] for name in self._stamps.keys() & self._cached.folds.keys()}
        hooks = self._cached.hooks
        numbers = {msgspec.msgpack.encode(process_hooks): number for number, process_hooks in enumerate(hooks)}
        for name, state in self._new.items():
            number = numbers.setdefault(msgspec.msgpack.encode(state.hooks), len(hooks))
            if number == len(hooks):
                hooks.append(state.hooks)
            if name in self._stamps:
                folds[name] = _CachedFold(self._stamps[name], number, structs.replace(state, hooks={}))
        cache.put(self._run, _PART, _CachedFolds(folds, hooks), str)


def _as_path(kind: type, value: Any) -> Any:
    return kind(value)
