"""Limits of recordings: room on the disk and size of a trace.

torch keeps what it records in memory and does not say how much that is. So the size of a trace is foretold by the trace
before of the same kind in the same process: the first one is cut when it is written, those that follow end in time.
"""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import NamedTuple

from autoprof.base import files, process
from autoprof.base.originals import os, time
from autoprof.config.settings import Settings

_MB = 1e6
# How often a recording that goes on is looked at.
_LOOK_S = 0.5


class OverBudget(Exception):
    """A recording does not begin; the message says why."""


class _Before(NamedTuple):
    """A recording that has been written: of which step, how large, how long it took."""

    step: int
    size: int
    seconds: float


class _State(process.State):
    """The last recording of each kind in this process."""

    def begin(self) -> None:
        self.before: dict[Hashable, _Before] = {}


_state = _State()


class Budget:
    """Limits of one recording.

    Args:
        kind: Key that alike recordings have in common.
        step: The global step that it is of.
        folder: The folder where its files go.
        raw: Path to which its tool writes, once that is known.
    """

    def __init__(self, settings: Settings, kind: Hashable, step: int, folder: Path) -> None:
        self._kind = kind
        self._step = step
        self._folder = folder
        self._limit = int(settings.max_trace_mb * _MB)
        self._floor = int(settings.min_free_mb * _MB)
        self._begun = self._ended = self._looked = time.monotonic()

    def begin(self) -> None:
        """Note that the recording begins.

        Raises:
            OverBudget: There would not be enough room on the disk.
        """
        before = _state.before.get(self._kind)
        expected = min(before.size, self._limit) if before is not None else 0
        free = _free(self._folder)
        if free < self._floor + expected:
            foretold = (
                f" and {_mb(expected)} for the trace, the size in step {before.step}" if before is not None else ""
            )
            raise OverBudget(
                f"not recorded: the disk has {_mb(free)} free and needs {_mb(self._floor)} to stay free{foretold} "
                "(AUTOPROF_MIN_FREE_MB)"
            )
        self._begun = self._looked = time.monotonic()

    def exceeded(self, raw: Path) -> str:
        """Return why the recording that goes on has to end now, or an empty text. Looks twice a second at most.

        Args:
            raw: Where its tool writes.
        """
        now = time.monotonic()
        if now - self._looked < _LOOK_S:
            return ""
        self._looked = now
        if _free(self._folder) < self._floor:
            return f"less than {_mb(self._floor)} is free on the disk (AUTOPROF_MIN_FREE_MB)"
        if files.is_folder(raw) and files.size(str(raw)) > self._limit:
            return f"the trace is over {_mb(self._limit)} (AUTOPROF_MAX_TRACE_MB)"
        before = _state.before.get(self._kind)
        if before is not None and before.seconds > 0:
            rate = before.size / before.seconds
            if (now - self._begun) * rate > self._limit:
                return (
                    f"the trace would pass {_mb(self._limit)} (AUTOPROF_MAX_TRACE_MB) "
                    f"at the {_mb(int(rate))} a second of step {before.step}"
                )
        return ""

    def end(self) -> None:
        """Note that the recording has ended."""
        self._ended = time.monotonic()

    def written(self, size: int) -> None:
        """Note how large what was recorded is, in bytes, before it is cut or compressed."""
        _state.before[self._kind] = _Before(self._step, size, self._ended - self._begun)


def _free(folder: Path) -> int:
    """Return the bytes that this user may still write to the disk of a folder that is there."""
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


def _mb(size: int) -> str:
    return f"{size / _MB:,.0f} MB"
