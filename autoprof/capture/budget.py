"""Limits of recordings: free disk space and size of a trace.

torch keeps its recording in memory and does not report the size. So the size of a trace is estimated from the previous
trace of the same kind in the same process. The first trace is cut when it is written; later recordings end in time.
"""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import NamedTuple

from autoprof.base import files, process
from autoprof.base.originals import os, time
from autoprof.config.settings import Settings

_MB = 1e6
# Minimum seconds between two checks of a recording.
_CHECK_S = 0.5


class OverBudget(Exception):
    """The recording does not begin, for the reason in the message."""


class _Before(NamedTuple):
    """Recording that has been written.

    Attributes:
        step: The global step.
        size: Bytes before compression.
        seconds: Duration of the recording.
    """

    step: int
    size: int
    seconds: float


class _BudgetState(process.State):
    """Last recording of each kind in this process."""

    def begin(self) -> None:
        self.before: dict[Hashable, _Before] = {}


_state = _BudgetState()


class Budget:
    """Limits of one recording.

    Args:
        settings: The settings of the capture.
        kind: Key that is the same for similar recordings.
        step: The global step.
        folder: The folder of its files.
    """

    def __init__(self, settings: Settings, kind: Hashable, step: int, folder: Path) -> None:
        self._kind = kind
        self._step = step
        self._folder = folder
        self._limit = int(settings.max_trace_mb * _MB)
        self._floor = int(settings.min_free_mb * _MB)
        self._begun = self._ended = self._checked = time.monotonic()

    def begin(self) -> None:
        """Note that the recording begins.

        Raises:
            OverBudget: The disk does not have enough free space.
        """
        before = _state.before.get(self._kind)
        expected = min(before.size, self._limit) if before is not None else 0
        free = _free(self._folder)
        if free < self._floor + expected:
            estimate = (
                f" and {_mb(expected)} for the trace, the size in step {before.step}" if before is not None else ""
            )
            raise OverBudget(
                f"not recorded: the disk has {_mb(free)} free and needs {_mb(self._floor)} to stay free{estimate} "
                "(AUTOPROF_MIN_FREE_MB)"
            )
        self._begun = self._checked = time.monotonic()

    def exceeded(self, raw: Path) -> str:
        """Return the reason why the recording must end now, or an empty text. Checks at most twice a second.

        Args:
            raw: Path to which the tool writes.
        """
        now = time.monotonic()
        if now - self._checked < _CHECK_S:
            return ""
        self._checked = now
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
        """Note the size of the recording in bytes, before it is cut or compressed."""
        _state.before[self._kind] = _Before(self._step, size, self._ended - self._begun)


def _free(folder: Path) -> int:
    """Return the bytes that this user may still write to the disk of an existing folder."""
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


def _mb(size: int) -> str:
    return f"{size / _MB:,.0f} MB"
